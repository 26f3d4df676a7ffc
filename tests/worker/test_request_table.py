from __future__ import annotations

from dataclasses import replace
from typing import Any

from plait.errors import EngineKilled
from plait.request import Event
from plait.worker.protocol import encode_event
from plait.worker.request_table import MAX_DEATHS, RequestTable
from tests.engine.hash_model import Reader, request


class Book:
    """A request table with readers; the test plays the engine."""

    def __init__(self, *names: str, **params: Any) -> None:
        self.table, self.reader = RequestTable(), Reader()
        for name in names:
            self.table.add(request(name, [1, 2], **params), self.reader, 1.0)
        self.keys = {name: key for key, name in enumerate(names, 1)}

    def due(self) -> list[str]:
        return [entry.request.id for entry in self.table.due()]

    def say(self, name: str, *token_ids: int, index: int = 0, **more: Any) -> None:
        event = Event(name, index, token_ids, **more)
        self.table.deliver(encode_event(self.keys[name], event), 2.0)

    def die(self, *names: str, arriving: str | None = None, is_foreign: bool = False) -> bool:
        key = self.keys[arriving] if arriving else 0
        return self.table.record_end([self.keys[n] for n in names], key, is_foreign=is_foreign)

    def failed(self) -> set[str]:
        return {name for name in self.keys if "error" in self.reader.ends(name)}


def test_everything_is_due_once_and_what_is_missing_again_after_a_death() -> None:
    book = Book("a", "b", n=2)
    assert book.due() == ["a", "b"]
    assert book.due() == []
    book.say("a", 7)
    book.say("a", 8, 9, index=1, finish_reason="stop")
    book.say("b", 5)
    assert not book.die()
    again = {entry.request.id: entry.so_far() for entry in book.table.due()}
    assert again["a"].resumed == ((7,), None)
    assert again["b"].resumed == ((5,), ())
    assert again["a"].prompt_token_ids == (1, 2)


def test_a_request_that_began_elsewhere_goes_on_behind_what_it_came_with() -> None:
    book = Book()
    came = replace(request("a", [1, 2], n=3), resumed=((7, 8), None, ()))
    book.table.add(came, book.reader, 1.0)
    book.keys["a"] = 1
    assert [entry.so_far() for entry in book.table.due()] == [came]
    book.say("a", 9)
    book.die()
    (again,) = book.table.due()
    assert again.so_far().resumed == ((7, 8, 9), None, ())
    book.say("a", 10, finish_reason="stop")
    book.say("a", 11, index=2, finish_reason="stop")
    assert len(book.table) == 0  # the choice that had ended before is not waited for
    assert book.reader.tokens("a") == [9, 10]


def test_a_moved_request_keeps_the_bound_of_mirostat() -> None:
    book = Book()
    came = replace(request("a", [1, 2], mirostat=2), resumed=((7,),), resumed_mu=(5.5,))
    book.table.add(came, book.reader, 1.0)
    assert [entry.request.id for entry in book.table.due()] == ["a"]
    book.die()
    assert [entry.so_far().resumed_mu for entry in book.table.due()] == [(5.5,)]


def test_a_request_that_no_engine_had_begins_anew() -> None:
    book = Book("a")
    book.die()
    assert [entry.so_far().resumed for entry in book.table.due()] == [()]


def test_suspects_run_one_after_the_other_the_newest_first_and_before_all_others() -> None:
    book = Book("a", "b", "c")
    book.due()
    assert book.die("a", "b")
    assert book.due() == ["b"]
    book.say("b", 1)
    assert book.due() == []
    book.say("b", 2)
    assert book.due() == ["a"]
    book.say("a", 1, finish_reason="stop")
    assert book.due() == ["c"]


def test_who_was_alone_in_neither_of_two_deaths_is_tried_again_alone() -> None:
    book = Book("a", "b", "c")
    book.due()
    book.die("a", "b", "c")
    assert book.due() == ["c"]
    book.say("c", 1, 2)
    assert book.due() == ["b"]
    book.die("b", "c")  # b was on trial, but c ran as well
    assert book.failed() == set()
    assert book.due() == ["b"]
    book.die("b")
    assert book.failed() == {"b"}
    assert isinstance(book.reader.last("b").error, EngineKilled)
    assert book.due() == ["a"]
    book.say("a", 1, 2)
    assert book.due() == ["c"]


def test_kill_from_outside_blames_no_request_that_was_alone() -> None:
    book = Book("a")
    for _ in range(MAX_DEATHS):
        assert not book.failed()
        book.due()
        book.die("a", is_foreign=True)
    assert book.failed() == {"a"}  # or it could go on for ever


def test_what_a_request_ends_on_arrival_is_its_own_fault() -> None:
    book = Book("a", "b")
    for _ in range(2):
        while book.due():
            book.say("a", 1, 2)
        book.die("a", arriving="b")
    assert book.failed() == {"b"}


def test_requests_that_are_never_alone_get_some_more_engines() -> None:
    book = Book("a", "b")
    for death in range(1, MAX_DEATHS + 1):
        for name in ("b", "a"):
            book.due()
            if death > 1:
                book.say(name, 1, 2)
        assert book.failed() == set()
        book.due()
        book.die("a", "b")
    assert book.failed() == {"a", "b"}
    assert len(book.table) == 0


def test_events_of_an_ended_choice_are_dropped() -> None:
    book = Book("a")
    book.due()
    book.say("a", 1, finish_reason="stop")
    book.say("a", 2)
    assert book.reader.tokens("a") == [1]
    assert book.table.cancel("a", None) is None


def test_a_choice_that_was_to_be_cancelled_ends_with_its_engine() -> None:
    book = Book("a", n=2)
    book.due()
    assert book.table.cancel("a", 1) == 1
    assert book.reader.ends("a") == []
    book.say("a", 7, 8, index=1)  # behind a stop string, and its engine ends before it reports the choice
    book.die("a")
    *_, last = book.reader.events["a", 1]
    assert last.finish_reason == "stop"
    assert last.trace is not None
    assert (last.trace.num_output_tokens, last.trace.num_prompt_tokens) == (2, 2)
    assert [entry.so_far().resumed for entry in book.table.due()] == [((), None)]
    assert book.table.num_ended == {"stop": 1}


def test_a_trial_is_as_long_as_what_an_engine_may_have_kept() -> None:
    """Tokens that are emitted by fours: the engine may have ended three tokens behind what is known."""
    book = Book("a", "b", more={"interval": 4})
    book.due()
    book.say("a", 1)
    book.say("a", 2, 3, 4, 5)
    assert book.die("a", "b")
    assert book.due() == ["b"]  # it had emitted nothing, so nothing is lost
    book.say("b", 1)
    book.say("b", 2)
    (entry,) = book.table.due()
    assert entry.so_far().interval == 1
    for token_id in range(6, 10):  # three that may be lost, the step that ended the engine
        book.say("a", token_id)
        assert entry.is_suspect
    book.say("a", 10)
    assert not entry.is_suspect
    assert not book.failed()
    assert book.die("a")  # nothing of it was kept since
    assert book.failed() == {"a"}


def test_a_new_engine_gets_mirostat_s_bound_of_each_choice() -> None:
    book = Book("a", n=2, mirostat=2)
    book.due()
    book.say("a", 7, mirostat_mu=4.5)
    book.say("a", 8, mirostat_mu=4.25)
    book.die()
    (again,) = (entry.so_far() for entry in book.table.due())
    assert (again.resumed, again.resumed_mu) == (((7, 8), ()), (4.25, None))


def test_a_place_is_given_back_before_the_reader_gets_the_last_event() -> None:
    table, seen = RequestTable(), list[int]()
    table.add(request("a", [1, 2], n=2), lambda event: seen.append(len(table)), 1.0)
    for index, reason in ((0, None), (0, "stop"), (1, "stop")):
        table.deliver(encode_event(1, Event("a", index, (7,), finish_reason=reason)), 2.0)
    assert seen == [1, 1, 0]
    table.add(request("b", [1, 2]), lambda event: seen.append(len(table)), 1.0)
    table.cancel("b", None)  # no engine has it, so it ends here
    assert seen == [1, 1, 0, 0]


def test_choices_wait_until_the_engine_has_seen_them_or_they_are_cancelled() -> None:
    book = Book("a", "b", "c", n=2)
    assert book.table.count_unseen(0) == 6
    assert book.due() == ["a", "b", "c"]
    assert [book.table.count_unseen(n) for n in range(4)] == [6, 4, 2, 0]
    book.table.cancel("b", None)
    book.table.cancel("c", 1)
    assert [book.table.count_unseen(n) for n in range(4)] == [3, 1, 1, 0]
    book.die()
    assert book.table.count_unseen(0) == 3  # of b is nothing left, and no engine has the others
    book.due()
    assert book.table.count_unseen(1) == 1


def test_no_reply_goes_on_with_other_numbers_than_it_began_with() -> None:
    """The adapter was unloaded meanwhile: its name is nothing's to the next engine, or another one's."""
    table, reader = RequestTable(), Reader()
    for name, adapter in (("begun", "a"), ("waits", "a"), ("other", "b"), ("plain", "")):
        table.add(replace(request(name, [1, 2]), adapter=adapter), reader, 1.0)
    assert len([*table.due()]) == 4
    table.add(replace(request("later", [1, 2]), adapter="a"), reader, 1.0)  # the engine gets it afterwards
    for key, name in ((1, "begun"), (3, "other"), (4, "plain")):
        table.deliver(encode_event(key, Event(name, 0, (7,))), 2.0)
    table.lose_adapter("a")
    table.deliver(encode_event(1, Event("begun", 0, (8,))), 2.0)  # the engine itself goes on with it
    assert "error" not in reader.ends("begun")
    table.record_end((), 0)
    text = "the adapter 'a' that had begun this reply was unloaded meanwhile"
    assert text in str(reader.last("begun").error)
    assert [entry.request.id for entry in table.due()] == ["waits", "other", "plain", "later"]
    table.record_end((), 0)
    assert [entry.request.id for entry in table.due()] == ["waits", "other", "plain", "later"]
