"""Likely cause and remedy by reason: docs/troubleshooting.md as data. A test holds the two together."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Remedy:
    """What is behind a reason, and what helps."""

    cause: str
    remedy: str


OPERATOR = {
    "NotObserved": Remedy(
        "no operator looks at this namespace, or not at this fleet",
        "start it; name the namespace in the chart's watchNamespaces; check the fleet's label rollfleet.io/operator",
    ),
    "OperatorNotReady": Remedy(
        "the operator is away, starting, or misses CRDs or permissions: its log names them",
        "read its log; `helm upgrade` brings CRDs and roles of its release",
    ),
    "NoLeader": Remedy(
        "no process of the operator acts: the API server does not answer it, or its processes get no CPU",
        "read its log; it acts again by itself, or another replica takes over within seconds",
    ),
    "PassFailed": Remedy(
        "the API server or a guard refused the operator, or did not answer",
        "it tries again by itself; cure what its words name",
    ),
    "PassCrashed": Remedy("a bug in the operator", "report it with the traceback; other fleets are not held up"),
}

NOT_ACCEPTED = {  # of a WeightVersion
    "EngineNotFound": Remedy(
        "spec.engineRef.name names no RolloutEngine of this namespace",
        "create the fleet, or make a WeightVersion with the right name: engineRef can't change",
    ),
    "AnotherWeightVersion": Remedy("the fleet has one already", "raise spec.version of that one, and delete this one"),
    "VersionNotHigher": Remedy(
        "the fleet has committed this version or a higher one",
        "ask for a higher number; to go back, `rollfleet rollback`",
    ),
    "VersionNotStored": Remedy(
        "onFailure.type is Rollback, and the committed version has no stored copy to go back to",
        "set onFailure.type Retry or Hold",
    ),
    "InvalidSpec": Remedy(
        "a field that the message names; often spec.volumes.checkpoints of the fleet is not set",
        "correct it; changing volumes replaces the fleet's pods, one by one",
    ),
}

IGNORED = {  # condition SettingsIgnored of a RolloutEngine
    "RlConfigDisabled": Remedy(
        "optional fields of spec.rlConfig are set, and spec.rlConfig.enabled is false: they have no effect",
        "set enabled to true, or remove them",
    ),
}

WAITING = {  # phase Pending
    "WaitingForFleet": Remedy(
        "the engines have not verified version 0 yet", "wait; else cure what keeps the fleet closed"
    ),
    "NoEngines": Remedy("no engine is up", "wait; else cure what keeps the engines from starting"),
    "TooFewEngines": Remedy("fewer engines are up than minServing", "start more, or lower minServing"),
    "ScaledToZero": Remedy("spec.replicas is 0", "scale the fleet"),
    "Rolling": Remedy(
        "the version before is still rolling out: an engine may answer from the one before that",
        "wait; else see why that engine does not move",
    ),
    "Reopening": Remedy(
        "engines that an update before closed are opening again", "wait: after 10 s it goes on without them"
    ),
}

AGAIN = "then `rollfleet retry`, or `rollfleet bump` with the checkpoint"
FAILED = {  # an update, or what holds it up
    "CheckpointNotFound": Remedy(
        "no such folder below volumes.checkpoints", f"correct the path, or put it there; {AGAIN}"
    ),
    "CheckpointIncomplete": Remedy(
        "a file is missing, truncated, or still being written",
        f"finish writing before the version is raised: write beside it and rename; {AGAIN}",
    ),
    "CheckpointInvalid": Remedy(
        "a header can't be read, bytes are not those of the manifest, or a path leads out of the volume",
        f"write the checkpoint again; {AGAIN}",
    ),
    "CheckpointChanged": Remedy(
        "files are not those that were checked",
        f"never write into a checkpoint that a version names; restore it, {AGAIN}",
    ),
    "CoverageFailed": Remedy(
        "tensors do not fit the model: renamed, missing, superfluous, of wrong shape or type",
        f"save the checkpoint under the model's names; {AGAIN}. A trainer sends them so, in a higher version",
    ),
    "DigestDisagrees": Remedy(
        "engines read different bytes from one path, or received different bytes of one push",
        f"the volume shows nodes different contents: wait for copies and caches, {AGAIN}",
    ),
    "DigestMismatch": Remedy(
        "what reached the device is not what was checked",
        "the volume shows nodes different contents; else look at the node's memory and driver",
    ),
    "ProbesDisagree": Remedy(
        "engines answer the probe differently with equal weights, or unlike verify.probe.expectedLogprobs",
        "give all engines equal hardware, image and arguments, let trainer and engine compute alike (dtype, "
        "attention), or raise verify.probe.maxAbsLogprobDiff",
    ),
    "ProbeFailed": Remedy(
        "an engine could not answer the probe", "keep all verify.probe.tokens within the model's vocabulary"
    ),
    "PauseFailed": Remedy("vLLM refused to pause", "read the engine's log"),
    "TransferFailed": Remedy("vLLM refused to load the weights", "read the engine's log"),
    "SleepFailed": Remedy(
        "an engine could not give its memory back or take it again",
        "read the engine's log: is spec.sleepMode Enabled, and does whoever shares the devices leave enough memory?",
    ),
    "CacheResetFailed": Remedy("vLLM could not drop its caches", "read the engine's log"),
    "DeadlineExceeded": Remedy(
        "a phase took longer than its deadline and nobody said why",
        f"raise that deadline of spec.deadlines; {AGAIN}",
    ),
    "EngineDead": Remedy("the engine's process is dead or dying", "`kubectl logs POD --previous` tells why"),
    "EnginesLost": Remedy(
        "all engines of the update restarted or vanished", "find out why they did: the events tell; " + AGAIN
    ),
    "SenderMissing": Remedy(
        "no trainer that may send this version holds the fleet's sender Lease and offers it",
        "start the trainer, or let it offer this version; the fleet's spec.trainers names who may; " + AGAIN,
    ),
    "SenderLost": Remedy(
        "the trainer stopped renewing its Lease, gave up, or lost it to another one, before all had the weights",
        "the trainer's own log tells why; it sends a higher version, or `rollfleet retry` waits for it again",
    ),
    "EngineUnreachable": Remedy(
        "an engine that may be open does not answer, so nobody can say that all are closed",
        "mend the network between the operator and port 8001, or delete the engine's pod",
    ),
    "CannotBeFenced": Remedy(
        "an engine whose pod is gone, or should be, may still answer clients: nobody said that its containers ended",
        "as its words say: see that its machine is off, then taint the node out of service or annotate the fleet",
    ),
    "WeightsLost": Remedy(
        "the update failed after weights were touched, and the version before has no stored copy",
        "let a trainer send the next version, or ask for a checkpoint: `rollfleet bump --checkpoint PATH`",
    ),
    "Quarantined": Remedy("an engine names an epoch that nobody gave it", "delete its pod"),
    "Unsupported": Remedy("the engine's guard lacks what is needed", "use an engine image of the operator's release"),
    "Refused": Remedy("an engine refused a command", "read its log, and report it"),
    "Uncertain": Remedy(
        "an engine was touched and its guard no longer knows what it holds",
        f"read its log; it is loaded anew before it opens; {AGAIN}",
    ),
    "UpdateFailed": Remedy(
        "the update failed, and why is on record no more: the fleet's status was lost",
        "`rollfleet history`, the events and the operator's log may know; then `rollfleet retry`",
    ),
    "Interrupted": Remedy(
        "the operator died between two writes, or a guard had seen a higher epoch: an attempt ended, and why is lost",
        "nothing: the next attempt runs; the operator's log may know more",
    ),
    "Cancelled": Remedy("a higher version was asked for", "nothing: the newer update goes on"),
    "Superseded": Remedy("a higher version was asked for", "nothing: the newer update goes on"),
}

STEPS = {  # an engine that an update waits for, and of which nothing worse is known
    "Preparing": Remedy(
        "the engine reads and checks the checkpoint: a large one, or a slow volume",
        "wait, the fleet serves on; else raise deadlines.prepareSeconds",
    ),
    "Quiescing": Remedy(
        "requests that ran at closing have not ended, or the engine has not been armed yet",
        "wait; how long requests may run on is pause.drainTimeoutSeconds, the end deadlines.quiesceSeconds",
    ),
    "Transferring": Remedy("the engine loads the weights", "wait; else raise deadlines.transferSeconds"),
    "Verifying": Remedy(
        "the engine drops its caches and answers the probe", "wait; else raise deadlines.verifySeconds"
    ),
    "Opening": Remedy(
        "the version is committed, and this engine has not opened yet", "wait: after 60 s it counts as a late joiner"
    ),
    "Rolling": Remedy(
        "the fleet rolls, and this engine may still answer from the version before",
        "wait for its turn; where it does not answer, mend that first",
    ),
    "NotAllCurrent": Remedy(
        "the update went on without this engine, by a failure of its own",
        "nothing: it is loaded again as a late joiner; its words tell why",
    ),
}

VERSIONS = {  # conditions of a WeightVersion by which a promise is given up, as its spec asks
    "MixedVersions": Remedy(
        "strategy Rolling: engines answer from two versions until all have moved, or as long as one can't be reached",
        "wait; a request may demand a version (X-Weight-Version-Required); whoever does not answer is named above",
    ),
    "SpansVersions": Remedy(
        "pause.mode keep: requests that ran at closing went on under the new weights, and tell which tokens are whose",
        "nothing, where that is meant; else pause.mode abort or wait, from the next update on",
    ),
}

UNAVAILABLE = {  # the fleet answers nobody
    "HostPathNotAllowed": Remedy(
        "the fleet mounts a directory of its node", "use a claim, or set the chart's hostPathVolumes.allowed"
    ),
    "InvalidSpec": Remedy("a field that the message names", "correct it"),
    "Unschedulable": Remedy(
        "the scheduler finds no node: too few NPUs, or a claim that does not exist",
        "free or add nodes, or create the claim in the fleet's namespace",
    ),
    "Starting": Remedy("engines load", "wait, at most startup.timeoutSeconds"),
    "ApplyFailed": Remedy(
        "the API server refuses what the fleet needs: quota, an unknown ServiceAccount, a toleration or limit",
        "change what its words name; the operator tries again with back-off",
    ),
    "Broken": Remedy(
        "no engine can serve: its image can't be pulled, or it ends as soon as it starts",
        "cure what its words and exit code name",
    ),
    "CannotStart": Remedy(
        "no engine can serve, and this one ended with exit code 78, which no restart cures; its pod is kept",
        "change what its words name in the fleet's spec; where the cause was outside of it, delete the pod",
    ),
    "RestartBudgetSpent": Remedy(
        "no engine can serve, and this one failed more often than startup.restartBudget allows; its pod is kept",
        "change what its words name in the fleet's spec; where the cause was outside of it, delete the pod",
    ),
    "WaitingForWeights": Remedy("engines are up, and nothing is verified yet", "wait; the engines below say what for"),
    "CatchingUp": Remedy(
        "engines load the committed version", "wait; the committed version's checkpoint must still be there"
    ),
    "RouterNotReady": Remedy(
        "a router can't answer: it finds no node, can't pull its image, or has found no engine of the serving set",
        "cure what its words name; where it runs, read its log: `kubectl logs POD`",
    ),
    "Updating": Remedy("an update has closed the fleet", "wait: it ends within the deadlines of its WeightVersion"),
    "ScaledToZero": Remedy("spec.replicas is 0", "scale the fleet"),
    "Held": Remedy(
        "an update failed, and its onFailure is Hold: touched engines stay closed",
        "look at them; then `rollfleet retry`, ask for another checkpoint, set another onFailure.type, or delete the "
        "WeightVersion, which restores the version before",
    ),
    "WeightsLost": Remedy(
        "no engine holds the committed version, and nobody can read it again",
        "put its folder back as it was, ask for a checkpoint that is there: `rollfleet bump --checkpoint PATH`, or let "
        "a trainer send the next version",
    ),
    "CommitUnknown": Remedy(
        "the fleet's status was lost, and no open engine tells the version, or one that may be open does not answer",
        "mend or fence whoever its words name; else ask for the checkpoint that shall be served: "
        "`rollfleet bump --checkpoint PATH`",
    ),
    "ProbesDisagree": Remedy(
        "engines differ already at version 0, and no majority agrees",
        "give all engines equal hardware, image and arguments",
    ),
}

ENGINES = {  # one engine
    "Unschedulable": UNAVAILABLE["Unschedulable"],
    "Broken": Remedy(
        "the engine cannot serve: its image can't be pulled, it ends as soon as it starts, or lets everybody in",
        "cure what its words and exit code name",
    ),
    "NotCreated": Remedy(
        "the node can't make the pod's container: mostly a volume or a Secret that is not there",
        "cure what its words name: a path of hostPath, a claim, a driver",
    ),
    "Unreachable": Remedy(
        "its guard does not answer, or obeys another operator",
        "mend the network to port 8001; an engine of another operator is replaced by itself, or its words say why not",
    ),
    "Unfenced": Remedy(
        "its pod is gone or being deleted, and nobody said that its containers ended",
        "as its words say; docs/troubleshooting.md has the cases under Engines that vanished",
    ),
    "Uncertain": Remedy(
        "its weights were touched and not verified",
        "nothing: it is restored by itself, unless its words say that an update holds it",
    ),
}

JOINING = {  # one engine that comes up and says what keeps it
    "Starting": Remedy("it was restarted and loads again", "cure what its words and exit code name, or wait"),
    "WaitingForWeights": Remedy(
        "it holds no weights that may be served, and joins with the next version, or after the update that runs",
        "wait; where its words name a file or a refusal, cure that; of a version that is stored nowhere name a copy in "
        "spec.recovery.checkpoint, or let a trainer send the next one",
    ),
    "CatchingUp": Remedy(
        "it could not load the committed version, and tries again with back-off",
        "cure what its words name: the committed version's checkpoint must still be there",
    ),
}

EXIT_CODES = {
    78: Remedy(
        "something in spec, image or volume that a restart can't cure; its words name it",
        "change it: a model path, an argument, a variable, or the engine image's release of vLLM",
    ),
    75: Remedy("a fault that a restart may cure", "wait; if it comes again, cure what its words name"),
    137: Remedy("killed, mostly for memory", "raise resources.limits.memory"),
}
