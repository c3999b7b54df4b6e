"""The tokenizer of bytes, and tokenizers that come with a model."""

import pytest
from tokenizers import Tokenizer

from raggedmoe.train.data.tokenizer import byte_tokenizer_json


@pytest.mark.parametrize(
    "text", ["héllo\n\tdef", "", " two  spaces ", "\x00\x7f\u00ad\u0100 \U0001f600\r\n", "<s> ##a"]
)
def test_the_byte_tokenizer_gives_the_bytes_of_utf8_and_back(text):
    tokenizer = Tokenizer.from_str(byte_tokenizer_json())
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_byte_tokenizer_has_the_256_bytes_and_no_other_token():
    assert sorted(Tokenizer.from_str(byte_tokenizer_json()).get_vocab().values()) == list(range(256))


def test_the_byte_tokenizer_decodes_bytes_that_are_no_text():
    tokenizer = Tokenizer.from_str(byte_tokenizer_json())
    assert tokenizer.decode([ord("a"), 0xFF, ord("b")]) == "a\N{REPLACEMENT CHARACTER}b"
