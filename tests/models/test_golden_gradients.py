"""Every family trains: with the gradients that `transformers` computed (tests/golden/README.md), and its loss falls.

One compiled step a model serves both, as compiling it is what takes the time.
"""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import interop
from raggedmoe.interop.folder import read_tensor_headers
from raggedmoe.models.decoder import DEFAULT_EXECUTION, decode, logits
from raggedmoe.models.module import Decoder
from raggedmoe.models.mtp import mtp_forward
from tests.models.drawn import EINSUM, GOLDEN, GOLDEN_NAMES, quick_jit

pytestmark = pytest.mark.both_ends

# transformers' own logits are within 2.3e-5 of float64, at a deviation of 2: 1e-5. A gradient passes both ways.
RELATIVE = 1e-4


def cross_entropy(scores, ids):
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), ids[:, :, None], axis=-1).mean()


def assert_marks(model, gradients, expected, layout, folder):
    """Written as a checkpoint, gradients have the names and layouts that transformers' were saved with."""
    interop.save(Decoder(model.config, params=jax.tree.map(jnp.asarray, gradients)), folder, layout=layout)
    stored = read_tensor_headers(folder)
    assert sorted(stored) == sorted(expected["gradient_names"])
    for tensor, (length, product) in zip(expected["gradient_names"], expected["gradient_marks"]):
        found = stored[str(tensor)].read().astype(np.float64)
        noise = np.random.default_rng(zlib.crc32(str(tensor).encode())).standard_normal(found.shape)
        assert abs(np.linalg.norm(found) - length) <= RELATIVE * length, tensor
        # A product with noise is about the length times a standard normal number.
        assert abs((found * noise).sum() - product) <= 3 * RELATIVE * length, tensor


# Parameters that get no gradient, by the end of their name, and why.
WITHOUT_GRADIENT = {"router_selection_bias": "it only decides who is chosen; the loss-free rule moves it"}


# Without the one that is tested below, and the one whose weights are another's in a second layout.
FAMILIES = [name for name in GOLDEN_NAMES if name not in ("deepseek_v3_mtp", "qwen3_moe_fused")]
# Trained through the ragged kernels: shared experts, and biases with the clamped activation. The others' experts are
# plain gated ones, and go by einsums, which compile in half the time.
THROUGH_KERNELS = ("deepseek_v3", "gpt_oss")


def trained(model, loss, num_steps):
    """The losses of some steps on one batch, the first one's gradients, and what else the first loss returned."""
    step = quick_jit(jax.value_and_grad(loss, has_aux=True))
    params, results, adam = jax.device_get(model.params), [], Adam(rate=3e-3)
    for _ in range(num_steps):
        (value, rest), gradients = jax.device_get(step(params))
        results.append((float(value), gradients, rest))
        params = adam.update(params, gradients)
    return [value for value, _, _ in results], *results[0][1:]


class Adam:
    """In NumPy: compiled for every parameter it would be a fifth of a step's compilation."""

    def __init__(self, rate):
        self.rate, self.steps, self.means, self.squares = rate, 0, {}, {}

    def update(self, params, gradients):
        self.steps += 1
        updated = {}
        for name, gradient in gradients.items():
            self.means[name] = 0.9 * self.means.get(name, 0) + 0.1 * gradient
            self.squares[name] = 0.999 * self.squares.get(name, 0) + 0.001 * gradient**2
            mean, square = self.means[name] / (1 - 0.9**self.steps), self.squares[name] / (1 - 0.999**self.steps)
            updated[name] = (params[name] - self.rate * mean / (np.sqrt(square) + 1e-8)).astype(gradient.dtype)
        return updated


def assert_all_learn(gradients):
    """All parameters get a gradient but those listed, in every layer, and every expert of the many."""
    without = {name for name, gradient in gradients.items() if not np.any(gradient)}
    assert without == {name for name in gradients if name.endswith(tuple(WITHOUT_GRADIENT))}
    idle = {
        name
        for name, gradient in gradients.items()
        if name.startswith("stacks.") and name not in without
        for layer in gradient
        if not np.any(layer)
    }
    assert not idle, "a layer gets no gradient"
    experts = {name for name in gradients if name.endswith(("moe.wi_0", "moe.wi_1", "moe.wo"))}
    assert all(np.abs(gradients[name]).max((-1, -2)).min() > 0 for name in experts), "an expert gets no gradient"


def assert_falls(losses):
    assert losses[-1] < 0.9 * losses[0], losses
    assert losses[-1] < min(losses[: len(losses) // 2]), losses


# Of two variants of a family the one with more: a low-rank query, tied embeddings. Mixtral and OLMoE have nothing that
# Qwen3 has not.
VARIANTS = ("deepseek_v2_lite", "qwen3_moe", "mixtral", "olmoe")
IN_CI = ("deepseek_v2", "gpt_oss", "qwen3_moe_tied")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in VARIANTS else [pytest.mark.ci] if name in IN_CI else [])
        for name in FAMILIES
    ],
)
def test_every_family_trains_with_the_gradients_of_transformers(name, tmp_path):
    expected = np.load(GOLDEN / name / "expected.npz")
    model = interop.load(GOLDEN / name)
    config, execution = model.config, DEFAULT_EXECUTION if name in THROUGH_KERNELS else EINSUM
    ids = jnp.asarray(expected["ids"])

    def loss(params):
        scores = logits(params, decode(params, ids, config, execution).hidden, config)
        return cross_entropy(scores[:, :-1], ids[:, 1:]), None

    losses, gradients, _ = trained(model, loss, num_steps=10)
    assert_all_learn(gradients)
    assert_falls(losses)
    layout = "fused" if name == "gpt_oss" else "per_expert"
    assert_marks(model, gradients, expected, layout, tmp_path / "gradients")


@pytest.mark.ci
def test_multi_token_prediction_is_transformers_layer_on_the_joined_vectors_and_trains(tmp_path):
    expected = np.load(GOLDEN / "deepseek_v3_mtp" / "expected.npz")
    model = interop.load(GOLDEN / "deepseek_v3_mtp")
    config = model.config
    assert config.mtp_layers == 1
    ids = jnp.asarray(expected["ids"])

    def loss(params):
        hidden = decode(params, ids, config, EINSUM).hidden
        (further,), _ = mtp_forward(params, hidden, ids, config, EINSUM)
        scores = logits(params, further, config)
        return cross_entropy(scores[:, :-2], ids[:, 2:]), scores

    losses, gradients, scores = trained(model, loss, num_steps=10)
    np.testing.assert_allclose(scores[:, :-1], expected["further_logits"], atol=2e-4, rtol=0)
    assert_falls(losses)
    assert_marks(model, gradients, expected, "per_expert", tmp_path / "gradients")
