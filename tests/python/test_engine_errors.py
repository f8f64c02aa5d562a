"""The engine's errors as Python exceptions: one class a code, in one place."""

import pathlib
import pickle
import tomllib

import pytest

import unbroken
from unbroken import _engine

CODES = {
    "InvalidArgumentError": "invalid_argument",
    "NotFoundError": "not_found",
    "AlreadyExistsError": "already_exists",
    "PermissionDeniedError": "permission",
    "NoSpaceError": "no_space",
    "IoError": "io",
    "UnavailableError": "unavailable",
    "DeadlineError": "deadline",
    "UnknownOutcomeError": "unknown",
    "DamagedError": "damaged",
    "FencedError": "fenced",
    "UnsupportedError": "unsupported",
    "CancelledError": "cancelled",
    "InternalError": "internal",
}


def test_there_is_one_class_for_each_code_and_no_other():
    classes = {
        name: value.code
        for name, value in vars(_engine).items()
        if isinstance(value, type) and issubclass(value, _engine.Error) and value is not _engine.Error
    }
    assert classes == CODES


@pytest.mark.parametrize("name", CODES)
def test_the_class_tells_whether_a_retry_can_help(name):
    error = getattr(_engine, name)("read x: cause")
    assert error.retryable is (name in {"UnavailableError", "DeadlineError"})
    assert error.data_may_be_lost is False
    assert str(error) == "read x: cause"


def test_wrong_input_is_a_value_error_as_it_is_where_python_checks():
    assert issubclass(_engine.InvalidArgumentError, ValueError)


def test_an_error_survives_the_way_between_processes():
    error = _engine.DamagedError("read x: bytes differ")
    error.data_may_be_lost = True
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is _engine.DamagedError
    assert str(copy) == "read x: bytes differ"
    assert copy.data_may_be_lost is True
    assert copy.code == "damaged"


def test_the_version_stands_in_one_place():
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert unbroken.__version__ == _engine.version == project["project"]["version"]


def test_what_the_engine_returns_is_raised_with_object_and_cause(tmp_path):
    absent = tmp_path / "absent"
    with pytest.raises(_engine.NotFoundError, match=rf"{absent}.*No such file or directory \(ENOENT\)") as raised:
        _engine.open_store(str(absent))
    assert raised.value.code == "not_found"
    assert raised.value.retryable is False
    assert raised.value.data_may_be_lost is False


class RaisingBoard(_engine.Board):
    """A board in Python that cannot answer."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def get(self, keys):
        raise self.error


def test_an_engine_error_raised_in_python_keeps_its_kind_on_the_way_through_the_engine():
    error = _engine.FencedError("vote: a newer start owns the run")
    error.data_may_be_lost = True
    with pytest.raises(_engine.FencedError, match="vote: a newer start owns the run") as raised:
        _engine.board_wait(RaisingBoard(error), "vote/3", 60.0)
    assert raised.value.data_may_be_lost is True
    assert raised.value.retryable is False


def test_any_other_exception_of_a_board_means_that_it_cannot_be_reached():
    with pytest.raises(_engine.UnavailableError, match="ConnectionResetError: peer has gone") as raised:
        _engine.board_wait(RaisingBoard(ConnectionResetError("peer has gone")), "vote/3", 60.0)
    assert raised.value.retryable is True


def test_an_error_object_that_cannot_be_printed_is_still_an_error():
    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    with pytest.raises(_engine.UnavailableError, match="Unprintable"):
        _engine.board_wait(RaisingBoard(Unprintable()), "vote/3", 60.0)
