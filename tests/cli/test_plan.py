"""`raggedmoe plan`: what a user reads before there are any devices."""

import json

import pytest

from raggedmoe.cli.plan import plan


def test_the_tables_say_who_holds_what_and_what_is_sent(capsys):
    assert plan(("mixtral-tiny", "expert_parallelism=2", "fsdp_parallelism=-1"), devices=8) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "mixtral-tiny on 8 devices (cpu): data 1 × fsdp 4 × expert 2 × tensor 1 = 8 devices" in text
    assert "experts expert over expert 2, model_dim over fsdp 4" in text
    assert "forward dispatch all-to-all expert 2" in text
    assert "backward wo reduce-scatter fsdp 4" in text
    assert "× the least" in text


def test_json_has_every_parameter_and_collective(capsys):
    assert plan(("mixtral-tiny", "expert_parallelism=4", "expert_strategy=ring"), json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"data": 1, "fsdp": 1, "expert": 4, "tensor": 1}
    assert found["strategy"] == "ring"
    sent = sum(each["sent_bytes"] for each in found["collectives"] if each["what"] in ("dispatch", "unpermute"))
    assert sent == found["least_sent_bytes"] > 0


def test_rows_in_8_bits_are_counted_with_their_scales(capsys):
    words = ("deepseek-v3", "expert_parallelism=8", "dispatch_dtype=int8", "max_target_length=256")
    for chip, scale in (("tpu7x", 512), ("h100", 4)):  # a TPU sends whole registers' rows
        assert plan((*words, "per_device_batch_size=1"), devices=8, hardware=chip, json=True) == 0
        found = json.loads(capsys.readouterr().out)
        sent = {each["direction"]: each["num_bytes"] for each in found["collectives"] if each["what"] == "dispatch"}
        assert sent == {"forward": 256 * 8 * (7168 + scale), "backward": 256 * 8 * 7168 * 2}


def test_a_topology_counts_the_devices_of_its_chips(capsys):
    assert plan(("deepseek-v3", "expert_parallelism=4", "fsdp_parallelism=-1"), topology="tpu7x:4x8x8") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "fsdp 128 × expert 4 × tensor 1 = 512 devices" in text
    assert "ragged-all-to-all" in text
    assert "for all 59 MoE layers" in text  # that of multi-token prediction among them
    assert "does not fit" not in text


def test_weights_that_are_gathered_again_are_counted(capsys):
    assert plan(("mixtral-tiny", "fsdp_parallelism=4"), json=True) == 0
    found = json.loads(capsys.readouterr().out)
    gathered = [each for each in found["collectives"] if each["kind"] == "all-gather"]
    assert {each["what"] for each in gathered} >= {"wi_0", "wi_1", "wo"}
    assert found["sent_again_bytes"] == sum(each["sent_bytes"] for each in gathered) > 0
    assert plan(("mixtral-tiny", "expert_parallelism=4"), json=True) == 0
    found = json.loads(capsys.readouterr().out)
    router = next(each for each in found["collectives"] if each["what"] == "router_kernel")
    assert found["sent_again_bytes"] == router["sent_bytes"]


def test_what_does_not_fit_and_devices_without_work_are_told(capsys):
    assert plan(("mixtral-8x7b",), topology="v6e:2x2") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "it does not fit" in text
    assert "1 of 4 devices used; fsdp_parallelism=-1 takes them all" in text


def test_devices_are_of_the_chip_that_is_named(capsys):
    assert plan(("deepseek-v3", "fsdp_parallelism=-1"), devices=256, hardware="h100") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "256 devices (h100)" in text
    assert " of 80 GB on each device" in text


def test_data_that_a_run_lacks_are_named(capsys):
    assert plan(("olmoe-1b-7b",)) == 0
    assert "olmoe-1b-7b is no model of bytes" in capsys.readouterr().out
    assert plan(("olmoe-1b-7b", "dataset_type=synthetic")) == 0
    assert "no model of bytes" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "room", "even"),
    [
        ((), "4,096 rows of a layer, 1.05 MB (as many as can come", "1,024"),
        (("token_chunks=2",), "2,048 rows of one of 2 chunks of tokens, 524 kB", "512"),
        (("tensor_parallelism=2", "tensor_split=model_dim"), "8,192 rows of a layer, 1.05 MB", "2,048"),
        (("ragged_buffer_factor=1.5",), "1,536 rows of a layer, 393 kB (ragged_buffer_factor=1.5", "1,024"),
    ],
)
def test_the_room_for_rows_is_printed_beside_an_even_share(words, room, even, capsys):
    sizes = ("per_device_batch_size=2", "max_target_length=256")
    assert plan(("mixtral-tiny", "expert_parallelism=4", *sizes, *words)) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"a device has room for {room}" in text
    assert text.endswith(f"evenly shared it gets {even}")


def test_what_crosses_slices_is_told_apart_from_what_stays_in_one(capsys):
    words = ("olmoe-tiny", "dcn_data_parallelism=2", "fsdp_parallelism=2", "gradient_accumulation_steps=3")
    assert plan(words) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "olmoe-tiny on 2 slices of 2 devices (cpu): data 2 × fsdp 2 × expert 1 × tensor 1 = 4 devices" in text
    assert "gradients: experts all-reduce data 2 393 kB 393 kB" in text  # half of 2 · 3 · 16 · 32 · 64
    assert "to other slices, 1.59 MB in a step of 3 micro-batches" in text
    assert plan(words, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    across = {each["what"]: each for each in found["across_slices"]}
    assert across["head"]["num_bytes"] == across["head"]["sent_bytes"] == 256 * 64 * 4 // 2
    assert (found["slices"], found["micro_batches"]) == (2, 3)
    gradient = next(each for each in found["collectives"] if (each["what"], each["kind"]) == ("wo", "all-reduce"))
    assert (gradient["num_slices"], gradient["sent_bytes"]) == (2, 0)


def test_a_topology_is_that_of_each_slice(capsys):
    assert plan(("olmoe-1b-7b", "dcn_data_parallelism=4", "fsdp_parallelism=-1"), topology="v5e:4x4") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "4 slices of v5e:4x4: data 4 × fsdp 16 × expert 1 × tensor 1 = 64 devices" in text


def test_one_device_sends_nothing(capsys):
    assert plan(("mixtral-tiny",)) == 0
    assert "an MoE layer sends nothing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (("mixtral-tiny", "fsdp_parallelism=-1"), {}, "say how many with --devices or --topology"),
        (("mixtral-tiny",), {"devices": 2, "topology": "v6e:2x2"}, "expected --devices or --topology, got both"),
        (("mixtral-tiny",), {"devices": 0}, "expected --devices >= 1, got 0"),
        (("mixtral-tiny", "fsdp_parallelism=-1"), {"devices": 256}, "256 devices: expected the chip .* use --hardware"),
        (("mixtral-tiny",), {"hardware": "v6e", "topology": "v6e:2x2"}, "expected --hardware or --topology, got both"),
        (("mixtral-tiny", "fsdp_parallelism=0"), {}, "expected fsdp_parallelism >= 1, or -1 for .*, got 0"),
        (("mixtral-tiny", "expert_parallelism=3"), {}, "expert_parallelism=3 does not divide num_experts=8"),
        (("mixtral-tiny",), {"topology": "v6e:4x5"}, "topology 'v6e:4x5': expected chips in 2 directions"),
        (("mixtral-tiny",), {"topology": "v9:2x2"}, "unknown topology 'v9:2x2'"),
    ],
)
def test_a_mistake_is_one_line_with_what_to_do(words, options, message):
    with pytest.raises(ValueError, match=message):
        plan(words, **options)
