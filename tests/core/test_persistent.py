"""``PersistentMap`` is a dictionary that leaves its former copies as they were."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightplane.controlplane.core.persistent import PersistentMap

KEYS = st.integers(0, 99).map(str)
STEPS = st.lists(st.tuples(st.sampled_from(["put", "without", "all"]), KEYS, st.integers()), max_size=150)


@given(st.integers(0, 80), STEPS)
def test_it_is_a_dictionary_in_order_and_former_copies_stay_as_they_were(
    n: int, steps: list[tuple[str, str, int]]
) -> None:
    model = {str(i): i for i in range(n)}
    found = PersistentMap(model)
    former: list[tuple[PersistentMap[int], dict[str, int]]] = []
    for how, key, value in steps:
        former.append((found, dict(model)))
        if how == "put":
            model[key] = value
            found = found.put(key, value)
        elif how == "all":
            several = {key: value, f"{key}x": value}
            model.update(several)
            found = found.put_all(several)
        elif key in model:
            del model[key]
            found = found.without(key)
    for one, expected in [*former, (found, model)]:
        assert list(one.items()) == list(expected.items()) and list(one) == list(expected)
        assert list(one.values()) == list(expected.values())
        assert list(one.newest_first()) == list(reversed(expected.values()))
        assert one == expected and len(one) == len(expected) and bool(one) is bool(expected)
        assert all(one[k] == v == one.get(k) and k in one for k, v in expected.items())


def test_what_is_not_there_is_told_as_a_dictionary_tells_it() -> None:
    found = PersistentMap({"a": 1})
    assert found.get("b") is None and found.get("b", 7) == 7 and "b" not in found
    with pytest.raises(KeyError):
        found["b"]
    with pytest.raises(KeyError):
        found.without("b")


def test_a_put_copies_one_chunk() -> None:
    before = PersistentMap({str(i): i for i in range(1000)})
    after = before.put("500", -1)
    shared = sum(a is b for a, b in zip(before._chunks, after._chunks, strict=True))
    assert shared == len(before._chunks) - 1 and after._where is before._where
