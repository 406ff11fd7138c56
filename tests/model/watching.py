"""What an operator of the model hears of pods: in order, late, and sometimes not at all for a while."""

import random
from collections.abc import Callable

from rollfleet_operator.core.observed import PodView
from tests.model.api_server import ApiServer
from tests.model.clock import Clock


class PodWatch:
    """Of one term. `later` calls back only as long as that lasts."""

    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        api: ApiServer,
        later: Callable[[float, Callable[[], None]], None],
        on_news: Callable[[], None],
    ) -> None:
        self.pods: dict[str, PodView] = {}
        self.listed = False
        self._gone: dict[str, bool] = {}  # by uid, whether its containers had ended, as far as it was told
        self._due: list[tuple[float, str, PodView | None]] = []
        self._clock = clock
        self._rng = rng
        self._api = api
        self._later = later
        self._on_news = on_news

    def hear(self, uid: str, view: PodView | None, lag_s: float, deaf_until: float) -> None:
        """In order, each as late as the watch is."""
        if not self.listed:
            return
        when = max(self._clock.time + self._rng.uniform(0.0, lag_s), deaf_until)
        if self._due:
            when = max(when, self._due[-1][0])
        self._due.append((when, uid, view))
        self._later(when - self._clock.time, self._take_in)

    def _take_in(self) -> None:
        while self._due and self._due[0][0] <= self._clock.time + 1e-9:
            _, uid, view = self._due.pop(0)
            if view is None:
                self._forget(uid)
            elif uid not in self._gone:
                self.pods[uid] = view
        self._on_news()

    def _forget(self, uid: str) -> None:
        known = self.pods.pop(uid, None)
        self._gone[uid] = self._gone.get(uid, False) or (known is not None and known.over)

    def ended(self, uid: str) -> bool:
        """Whether the pod is gone and its containers had ended by the kubelet's word."""
        return self._gone.get(uid, False)

    def catch_up(self) -> None:
        """Everything that is late is told now."""
        self._due = [(self._clock.time, uid, view) for _, uid, view in self._due]
        self._take_in()

    def list(self) -> None:
        """The first list is from quorum."""
        self.pods = dict(self._api.pods)
        self._due.clear()
        self.listed = True

    def learn(self, uid: str) -> None:
        """The answer to a write is newer than what the watch told."""
        view = self._api.pods.get(uid)
        if view is None:
            self._forget(uid)
        else:
            self.pods[uid] = view
