"""Only a client that floods the queue is refused. Retry-After is based on measurements."""

import pytest

from qwen_serve.server.engine import QueueFull
from qwen_serve.server.engine.admission import LONGEST_RETRY_S, AdmissionControl


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("qwen_serve.server.engine.admission.perf_counter", clock)
    return clock


def test_one_tenant_may_have_all_places_and_no_more() -> None:
    admission = AdmissionControl(2, 3)
    for _ in range(5):
        admission.take("")
    with pytest.raises(QueueFull, match=r"^2 requests run and 3 wait already; try again later$") as caught:
        admission.take("")
    assert caught.value.retry_after == 1
    admission.leave("")
    admission.take("")


def test_who_floods_is_refused_and_not_his_neighbours() -> None:
    admission = AdmissionControl(4, 8)
    for _ in range(12):
        admission.take("flood")
    for _ in range(6):
        admission.take("neighbour")
    with pytest.raises(QueueFull, match="6 of them of this API key"):
        admission.take("neighbour")
    with pytest.raises(QueueFull, match="12 of them of this API key"):
        admission.take("flood")
    for _ in range(6):
        admission.leave("flood")
        with pytest.raises(QueueFull):
            admission.take("flood")
    admission.take("third")
    admission.leave("neighbour")
    admission.leave("flood")
    admission.take("flood")


def test_thousands_of_tenants_have_twice_the_places_at_most() -> None:
    admission = AdmissionControl(8, 92)
    taken = 0
    for number in range(3000):
        try:
            admission.take(f"{number}")
            taken += 1
        except QueueFull:
            pass
    assert taken == 200


@pytest.mark.parametrize(("each", "seconds"), [(0.01, 1), (1.5, 12), (3.0, 24), (50.0, LONGEST_RETRY_S)])
def test_it_may_come_again_when_its_requests_will_have_ended(clock: Clock, each: float, seconds: int) -> None:
    admission = AdmissionControl(4, 12)
    for _ in range(16):
        admission.take("flood")
    for _ in range(20):
        clock.now += each
        admission.leave("flood")
        admission.take("flood")
    for _ in range(7):
        admission.take("other")
    with pytest.raises(QueueFull) as caught:
        admission.take("flood")  # 16 where 8 are an even part, 7 above all places: 8 have to end
    assert caught.value.retry_after == pytest.approx(seconds, abs=1)
