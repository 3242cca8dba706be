"""From the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import threading

from server.engine import Generation, Timings
from server.engine.mailbox import Mailbox


def generation(*, patient: bool = False) -> Generation:
    made = Generation(1, Timings(), lambda: None)
    made.patient = patient
    return made


async def test_letters_come_in_order_and_nobody_misses_one() -> None:
    mailbox = Mailbox(asyncio.get_running_loop())
    listeners = [generation() for _ in range(3)]

    def engine() -> None:
        for step in range(200):
            for listener in listeners:
                mailbox.put(listener, [step], "length" if step == 199 else None)
            assert mailbox.post()

    thread = threading.Thread(target=engine)
    thread.start()
    for listener in listeners:
        assert [token async for tokens in listener for token in tokens] == list(range(200))
    thread.join()
    mailbox.close()


async def test_nobody_is_woken_for_the_patient_before_the_end() -> None:
    mailbox = Mailbox(asyncio.get_running_loop())
    patient = generation(patient=True)
    listener = asyncio.create_task(anext(patient))
    for step in range(3):
        mailbox.put(patient, [step], None)
        assert mailbox.post()
    await asyncio.sleep(0.01)
    assert patient._arrived == []
    mailbox.put(patient, [], "stop")
    assert mailbox.post()
    assert await listener == [0, 1, 2]
    mailbox.close()


async def test_who_waits_is_woken_though_others_are_patient() -> None:
    mailbox = Mailbox(asyncio.get_running_loop())
    patient, waiting = generation(patient=True), generation()
    mailbox.put(patient, [1], None)
    assert mailbox.post()
    mailbox.put(waiting, [2], None)
    assert mailbox.post()
    assert await anext(waiting) == [2]
    assert await anext(patient) == [1], "what was put before came along"
    mailbox.close()


async def test_what_was_posted_arrives_though_the_mailbox_is_closed() -> None:
    mailbox = Mailbox(asyncio.get_running_loop())
    listener = generation()
    mailbox.put(listener, [1], "stop")
    assert mailbox.post()
    mailbox.close()
    mailbox.close()
    assert [tokens async for tokens in listener] == [[1]]
    assert not mailbox.post()


def test_a_loop_that_is_closed_has_no_listeners() -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    loop.close()
    assert not mailbox.post()
    mailbox.close()
