"""A sample of what a model writes, at each evaluation of a run: how its text continues a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from raggedmoe.models.config import ModelConfig
from raggedmoe.models.execution import ModelExecution
from raggedmoe.models.generate import Sampling, generate
from raggedmoe.models.module import Decoder
from raggedmoe.params import Params
from raggedmoe.sharding.axes import LogicalMesh
from raggedmoe.train.data.batches import Data
from raggedmoe.train.data.rows import Batch
from raggedmoe.train.data.tokenizer import TextTokenizer
from raggedmoe.train.settings.resolve import ResolvedConfig

PROMPT_TOKENS = 32  # of the first row that is held out
# The same draws at every evaluation, so that what differs is the model's doing.
SAMPLING, SEED = Sampling(temperature=0.7), 0


@dataclass(frozen=True, kw_only=True)
class TextSample:
    """A prompt and the text that a model puts after it."""

    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Continues one prompt with whatever parameters it is given. It changes nothing of them."""

    config: ModelConfig
    execution: ModelExecution
    mesh: LogicalMesh
    tokenizer: TextTokenizer
    prompt: Sequence[int]
    num_tokens: int
    num_copies: int  # of the prompt: each shard of tokens of a mesh gets one

    def __call__(self, params: Params, amax_history: Params) -> TextSample:
        model = Decoder(self.config, params=params, execution=self.execution, mesh=self.mesh, amax_history=amax_history)
        stop = () if self.tokenizer.end is None else (self.tokenizer.end,)
        prompts = [self.prompt] * self.num_copies
        tokens = generate(model, prompts, max_new_tokens=self.num_tokens, sampling=SAMPLING, stop=stop, seed=SEED)
        made = [first for first, *_ in tokens if first is not None]
        return TextSample(prompt=self.tokenizer.decode(self.prompt), text=self.tokenizer.decode(made))


def make_sampler(config: ResolvedConfig, data: Data, held_out: Sequence[Batch], mesh: LogicalMesh) -> Sampler | None:
    """Make what a run samples its text with; None: it is not asked to, or its tokens are no text."""
    model, tokenizer, asked = config.step.model, data.tokenizer, config.run
    if not asked.num_sample_tokens or tokenizer is None:
        return None
    if asked.sample_prompt is not None:
        (prompt,) = (tokens.tolist() for tokens in tokenizer.encode_texts([asked.sample_prompt]))
    else:
        prompt = _first_tokens(held_out) if held_out else []
    prompt = prompt[: model.max_length - 1]
    if not prompt:
        return None
    moe = replace(config.step.execution.moe, ragged_buffer_factor=None)  # the model, whatever room its training has
    return Sampler(
        config=model,
        execution=replace(config.step.execution, moe=moe, remat="none"),
        mesh=mesh,
        tokenizer=tokenizer,
        prompt=prompt,
        num_tokens=min(asked.num_sample_tokens, model.max_length - len(prompt)),
        num_copies=config.plan.num_token_shards,
    )


def _first_tokens(held_out: Sequence[Batch]) -> list[int]:
    """Return the beginning of the first document of the first row."""
    first = held_out[0]
    return first.ids[0][np.asarray(first.segments[0]) == 0][:PROMPT_TOKENS].tolist()
