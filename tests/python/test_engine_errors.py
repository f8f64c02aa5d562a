"""The engine's errors as Python exceptions: one class a code, in one place."""

import importlib.metadata
import pickle

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


def test_package_engine_and_what_is_installed_are_of_one_version():
    assert unbroken.__version__ == _engine.version == importlib.metadata.version("unbroken")
