"""The engine's metrics on /metrics."""

from typing import cast

from qwen_serve.server.api.observe.metrics import Metrics
from qwen_serve.server.engine import EngineStats
from qwen_serve.server.engine.batch import Batch, Chunk
from qwen_serve.server.engine.prefix_cache import PrefixStats
from qwen_serve.server.engine.profile import PHASES, StepProfile
from qwen_serve.server.engine.speculation import DrafterStats

CHUNK = cast(Chunk, None)
"""How many there are counts alone."""


def test_counters_come_from_the_snapshot() -> None:
    profile = StepProfile()
    for rows in (1, 3, 4, 5):
        profile.start()
        for phase in PHASES:
            profile.lap(phase)
        profile.finish(Batch([CHUNK] * rows, n_tokens=rows, n_rows=rows))
    stats = EngineStats(
        running=1,
        waiting=2,
        steps=4,
        prompt_tokens=5,
        generated_tokens=6,
        preemptions=7,
        kv_cells_used=8,
        kv_cells=9,
        prefix=PrefixStats(hits=10, resident_cells=11, failed_copies=13),
        tiers={"priority": (3, 19.5), "default": (0, 0.0), "flex": (20, 21.0)},
        step_totals=profile.times(),
        drafts={
            "ngram": DrafterStats(steps=14, drafted=15, accepted=16),
            "mtp": DrafterStats(failed=17, unready=18, state="cooldown"),
        },
    )
    metrics = Metrics()
    before = metrics.render(None).decode()
    assert "qwen_steps" not in before
    assert "qwen_running_sequences 0.0" in before
    assert "qwen_kv_cells 0.0" in before
    assert "\nprocess_resident_memory_bytes " in before, "what `qwen-bench soak` watches"
    text = metrics.render(stats).decode()
    for line in [
        "qwen_running_sequences 1.0",
        "qwen_waiting_sequences 2.0",
        "qwen_kv_cells_used 8.0",
        "qwen_kv_cells 9.0",
        "qwen_preemptions_total 7.0",
        'qwen_waiting_requests{service_tier="priority"} 3.0',
        'qwen_waiting_requests{service_tier="flex"} 20.0',
        'qwen_served_cost_total{service_tier="priority"} 19.5',
        'qwen_time_to_first_token_seconds_count{service_tier="flex"} 0.0',
        'qwen_queue_seconds_count{service_tier="default"} 0.0',
        "qwen_prefix_hits_total 10.0",
        "qwen_prefix_failed_copies_total 13.0",
        "qwen_prefix_resident_cells 11.0",
        'qwen_draft_verifications_total{drafter="ngram"} 14.0',
        'qwen_drafted_tokens_total{drafter="ngram"} 15.0',
        'qwen_accepted_draft_tokens_total{drafter="ngram"} 16.0',
        'qwen_drafts_failed_total{drafter="mtp"} 17.0',
        'qwen_drafts_unready_total{drafter="mtp"} 18.0',
        'qwen_drafter_active{drafter="ngram"} 1.0',
        'qwen_drafter_active{drafter="mtp"} 0.0',
        'qwen_steps_total{kind="decode",rows="1"} 1.0',
        'qwen_steps_total{kind="decode",rows="4"} 2.0',
        'qwen_steps_total{kind="decode",rows="8"} 1.0',
        'qwen_step_tokens_total{kind="decode",rows="4"} 7.0',
    ]:
        assert line in text
    for phase in PHASES:
        assert f'qwen_step_seconds_total{{kind="decode",phase="{phase}",rows="1"}}' in text or (
            f'qwen_step_seconds_total{{kind="decode",rows="1",phase="{phase}"}}' in text
        )
