"""The address plan: pure data, and the names that the cluster takes on the machine."""

from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network

from devcluster.errors import InvalidInputError

# Names on the machine. They are fixed, as is the kubelet's folder of device plugins: one cluster per machine.
BRIDGE = "rollfleet0"
CNI_NETWORK = "rollfleet-devcluster"
NFT_TABLE = "rollfleet_devcluster"
CGROUP = "rollfleet-devcluster"
NODE = "node-0"
CLUSTER_DOMAIN = "cluster.local"

DNS_OFFSET = 10  # kubeadm's habit: the tenth service address is the cluster's DNS
FIRST_POD_OFFSET = 16  # the gateway and a few addresses kept free below it
MAX_PODS = 250


@dataclass(frozen=True)
class AddressPlan:
    """Ranges of 198.18.0.0/15, which RFC 2544 sets aside for tests and nobody routes."""

    pods: IPv4Network = field(default_factory=lambda: IPv4Network("198.18.0.0/23"))
    services: IPv4Network = field(default_factory=lambda: IPv4Network("198.19.0.0/24"))
    api_port: int = 6443
    etcd_port: int = 23790
    etcd_peer_port: int = 23800
    dns_port: int = 10053
    dns_ready_port: int = 18181

    def __post_init__(self) -> None:
        if self.pods.overlaps(self.services):
            raise InvalidInputError(f"pods {self.pods} and services {self.services} overlap")
        if self.pods.num_addresses - FIRST_POD_OFFSET - 1 < MAX_PODS:
            raise InvalidInputError(f"{self.pods} has no room for {MAX_PODS} pods")
        if self.services.num_addresses <= DNS_OFFSET:
            raise InvalidInputError(f"{self.services} has no room for the DNS service")

    @property
    def gateway(self) -> IPv4Address:
        """The bridge's address: the node's, the API server's and the DNS server's."""
        return self.pods[1]

    @property
    def first_pod(self) -> IPv4Address:
        return self.pods[FIRST_POD_OFFSET]

    @property
    def kubernetes_service(self) -> IPv4Address:
        """The API server takes the first service address for `kubernetes.default`."""
        return self.services[1]

    @property
    def dns_service(self) -> IPv4Address:
        return self.services[DNS_OFFSET]

    @property
    def api_url(self) -> str:
        return f"https://{self.gateway}:{self.api_port}"

    @property
    def etcd_url(self) -> str:
        return f"http://127.0.0.1:{self.etcd_port}"

    @property
    def etcd_peer_url(self) -> str:
        return f"http://127.0.0.1:{self.etcd_peer_port}"
