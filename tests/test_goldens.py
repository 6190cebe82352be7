"""Reports of `goldens.py compare`. Recording takes minutes and is not part of the suite."""

import numpy as np

from goldens import Arrays, differences


def test_equal_arrays_have_no_differences() -> None:
    arrays: Arrays = {"weights": np.array([0.1, np.nan]), "token": np.asarray("[CLS]")}
    assert not list(differences(arrays, {name: array.copy() for name, array in arrays.items()}))


def test_added_arrays_are_not_differences() -> None:
    assert not list(differences({}, {"added": np.zeros(1)}))


def test_one_changed_bit_is_reported_with_count_and_distance() -> None:
    golden = np.array([[1.0, 2.0], [-0.0, 3.0]], dtype=np.float32)
    now = golden.copy()
    now[0, 1] = np.nextafter(now[0, 1], np.float32(4))
    now[1, 0] = 0.0
    [line] = differences({"encoder.last_hidden_state": golden}, {"encoder.last_hidden_state": now})
    assert line == "encoder.last_hidden_state: 2 of 4 elements differ, by up to 2.38e-07"


def test_missing_reshaped_and_reworded_arrays_are_reported() -> None:
    golden: Arrays = {"a": np.zeros(2), "b": np.zeros((2, 3)), "c": np.asarray("old"), "d": np.zeros(1)}
    now: Arrays = {"b": np.zeros((3, 2)), "c": np.asarray("new text"), "d": np.zeros(1, dtype=np.float32)}
    assert list(differences(golden, now)) == [
        "a: missing",
        "b: float64 (2, 3) is now float64 (3, 2)",
        "c: 'old' is now 'new text'",
        "d: float64 is now float32",
    ]
