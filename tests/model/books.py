"""What the auditor writes down: the books of one fleet, and of what was asked for."""

from collections import Counter
from dataclasses import dataclass, field

from rollfleet_operator.api.rolloutengine import Committed
from rollfleet_operator.api.weightversion import WeightVersionSpec

Update = tuple[str, int]  # uid of the WeightVersion, version


class BrokenPromise(AssertionError):  # noqa: N818 - a promise is broken, not an error made
    """A promise that did not hold; `promise` is its name in the list of mutations."""

    def __init__(self, promise: str, text: str) -> None:
        super().__init__(f"{promise}: {text}")
        self.promise = promise


@dataclass
class Hold:
    """An update failed and left what it touched as it is, until a person acts."""

    epoch: int  # since which nothing may be loaded or verified


@dataclass
class Failure:
    """The recorded end of an update."""

    epoch: int
    retry_request: str  # that was followed


@dataclass
class Book:
    """Of one fleet, from its creation to its deletion."""

    uid: str
    committed: Committed | None = None  # as it was written last; outlives a lost status
    lost: bool = False  # the status was lost and nothing was committed since
    ever_lost: bool = False  # after that epochs may begin anew: nobody may know of the old ones
    rolled_from: int | None = None  # the version before, of a roll whose record was lost
    versions: set[int] = field(default_factory=set)  # that were ever committed
    highest_answered: int = -1
    epochs: dict[int, tuple[str, int, int]] = field(default_factory=dict)  # epoch -> (uid, version, attempt)
    senders: dict[int, str] = field(default_factory=dict)  # epoch -> holder that was chosen to send
    verified: dict[tuple[int, int], set[str]] = field(default_factory=dict)  # (version, epoch) -> incarnations
    failures: dict[Update, Failure] = field(default_factory=dict)
    hold: Hold | None = None
    proven: set[str] = field(default_factory=set)  # templates of which an engine has served


@dataclass
class Ledger:
    """What outlives fleets."""

    specs: dict[Update, WeightVersionSpec] = field(default_factory=dict)  # as asked for last
    paths: dict[Update, set[str | None]] = field(default_factory=dict)  # where it is stored, as was ever said
    commits: int = 0
    seen: Counter[str] = field(default_factory=Counter)  # situations that were reached
