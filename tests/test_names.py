"""The error for an unknown name."""

from dataclasses import dataclass
from typing import Literal

import pytest

from raggedmoe.names import check_known, check_words

STRATEGIES = ("local", "ring", "all_to_all")


def test_an_unknown_name_is_refused_with_the_known_ones_and_the_nearest():
    check_known("strategy", "ring", STRATEGIES)
    with pytest.raises(ValueError, match=r"unknown strategy 'rings': .* local, ring, all_to_all; did you mean 'ring'"):
        check_known("strategy", "rings", STRATEGIES)


def test_a_name_like_none_of_the_known_ones_gets_no_suggestion():
    with pytest.raises(ValueError, match=r"unknown strategy 'xyz': expected one of local, ring, all_to_all$"):
        check_known("strategy", "xyz", STRATEGIES)


@dataclass
class Pipeline:
    """A configuration with a word and a number."""

    strategy: Literal["local", "ring"] = "local"
    chunks: int = 1


def test_a_field_takes_the_words_of_its_type_and_another_field_anything():
    check_words(Pipeline(strategy="ring", chunks=3))
    with pytest.raises(ValueError, match=r"unknown strategy 'rings': expected one of local, ring; did you mean 'ring'"):
        check_words(Pipeline(strategy="rings"))
