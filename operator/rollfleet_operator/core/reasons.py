"""Reasons of conditions, events and metrics: constants, with one sentence each."""

from enum import StrEnum


class Reason(StrEnum):
    """A cause in CamelCase. `sentence` says what it means and, where something can be done, what."""

    sentence: str

    def __new__(cls, value: str, sentence: str) -> "Reason":
        """A member is its own text and carries its sentence."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.sentence = sentence
        return member

    # Accepted
    ACCEPTED = "Accepted", "The specification is valid."
    INVALID_SPEC = "InvalidSpec", "The specification contradicts itself or the operator's settings."
    HOST_PATH_NOT_ALLOWED = "HostPathNotAllowed", "The operator was started without host paths allowed."
    ENGINE_NOT_FOUND = "EngineNotFound", "No RolloutEngine of that name exists in this namespace."
    ANOTHER_WEIGHT_VERSION = "AnotherWeightVersion", "Another WeightVersion is in charge of this fleet."
    VERSION_NOT_HIGHER = "VersionNotHigher", "The version must exceed the one that the fleet has committed."

    VERSION_NOT_STORED = "VersionNotStored", "onFailure Rollback needs a stored copy of the committed version."

    # the fleet
    SERVING = "Serving", "Engines serve the committed version."
    STARTING = "Starting", "Engines are starting."
    UNSCHEDULABLE = "Unschedulable", "The scheduler finds no node for the engines."
    SCALED_TO_ZERO = "ScaledToZero", "spec.replicas is 0."
    WAITING_FOR_WEIGHTS = "WaitingForWeights", "Engines hold no verified weights yet."
    CATCHING_UP = "CatchingUp", "Engines are loading the committed version."
    UPDATING = "Updating", "The fleet is closed while its weights change."
    APPLY_FAILED = "ApplyFailed", "The API server does not take what the fleet needs."
    COMMIT_UNKNOWN = "CommitUnknown", "The record of the committed version is lost and no open engine tells it."
    WEIGHTS_LOST = "WeightsLost", "The committed version is stored nowhere and no engine holds it."
    HELD = "Held", "An update failed after weights were touched, and its onFailure is Hold."
    BROKEN = "Broken", "No engine can serve."
    RESTART_BUDGET_SPENT = "RestartBudgetSpent", "An engine failed more often than spec.startup.restartBudget allows."
    CANNOT_START = "CannotStart", "An engine says that no restart cures what keeps it from starting (exit code 78)."
    STEADY = "Steady", "Nothing is changing."
    REPLACING = "Replacing", "Pods are being created, replaced or removed."
    ALL_WELL = "AllWell", "Every engine serves."
    ENGINES_NOT_WELL = "EnginesNotWell", "Some engines do not serve; status.engines.details says why."
    CURRENT = "Current", "The engines serve the version that is asked for."
    UPDATE_PENDING = "UpdatePending", "A newer version is asked for."
    UPDATE_FAILED = "UpdateFailed", "The newest update failed; the version before it stays committed."
    NOT_ALL_CURRENT = "NotAllCurrent", "Some engines do not hold the committed version yet."
    PROBES_DISAGREE = "ProbesDisagree", "Engines answer the probe differently under what should be the same weights."

    RL_CONFIG_DISABLED = "RlConfigDisabled", "Fields of spec.rlConfig are set without spec.rlConfig.enabled."
    NOTHING_IGNORED = "NothingIgnored", "Every field of the spec has its effect."

    # steps of an update
    PENDING = "Pending", "The update has not begun."
    PREPARING = "Preparing", "All that can fail is checked before anything is paused."
    QUIESCING = "Quiescing", "Gates close and requests in flight end."
    QUIESCED = "Quiesced", "All engines are closed, drained and armed."
    TRANSFERRING = "Transferring", "Engines take the weights."
    TRANSFERRED = "Transferred", "All engines hold the weights, with equal digests."
    VERIFYING = "Verifying", "Caches are reset and the probe is answered."
    VERIFIED = "Verified", "All engines answered the probe alike."
    OPENING = "Opening", "The version is committed and the gates open."
    REQUESTS_KEPT = "RequestsKept", "Requests that ran at closing go on under the new weights: answers span versions."
    NONE_KEPT = "NoneKept", "No request is kept over a change of weights."
    ACTIVE = "Active", "The fleet serves this version."
    SUPERSEDED = "Superseded", "A higher version was asked for."

    # why an update cannot begin, or failed, where no engine's own reason tells it
    WAITING_FOR_FLEET = "WaitingForFleet", "The fleet has not verified its first version yet."
    NO_ENGINES = "NoEngines", "No engine is up."
    TOO_FEW_ENGINES = "TooFewEngines", "Fewer engines can take part than spec.minServing."
    ROLLING = "Rolling", "Engines move to the version batch by batch; this one and the one before answer."
    ONE_VERSION = "OneVersion", "All answers come from one version."
    REOPENING = "Reopening", "Engines that an earlier update closed open first."
    ENGINE_UNREACHABLE = "EngineUnreachable", "An engine that may be open does not answer."
    CANNOT_BE_FENCED = "CannotBeFenced", "An engine that nobody controls any more may still answer clients."
    QUARANTINED = "Quarantined", "An engine names an epoch that nobody gave it; delete its pod."
    UNSUPPORTED = "Unsupported", "An engine lacks what the update needs."
    DIGEST_DISAGREES = "DigestDisagrees", "Engines hold different bytes of what should be the same weights."
    REFUSED = "Refused", "An engine refused a command."
    DEADLINE_EXCEEDED = "DeadlineExceeded", "A phase took longer than its deadline."
    INTERRUPTED = "Interrupted", "An attempt ended with its epoch, and nobody recorded why."
    ENGINES_LOST = "EnginesLost", "So many engines of the update restarted or vanished that too few are left."
    SENDER_MISSING = "SenderMissing", "No trainer stands ready to send this version."
    SENDER_LOST = "SenderLost", "The trainer that sent the weights is gone, or stopped."
    UNCERTAIN = "Uncertain", "An engine no longer knows what it holds."
    NOT_REACHED = "NotReached", "The update has not come so far."
    OPENED = "Opened", "The gates are open again."
