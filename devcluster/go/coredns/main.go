// Command coredns is CoreDNS with the plugins that a cluster's DNS needs and no more: the full set compiles the clients
// of several clouds and takes minutes.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/loop"
	_ "github.com/coredns/coredns/plugin/ready"
)

func main() {
	// CoreDNS calls plugins in this order, whatever the order in the configuration.
	dnsserver.Directives = []string{"bind", "ready", "errors", "cache", "loop", "kubernetes", "forward"}
	coremain.Run()
}
