"""How to sample a sequence's tokens: the request's settings, and the state its slot holds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dsv4.ops.sample.sample import BIAS, IN_PROMPT, PENALTIES
from dsv4.request import SamplingParams


@dataclass(frozen=True)
class SamplingRow:
    """Sampling settings of a sequence; one object serves all its steps, except for the mask."""

    params: SamplingParams
    seed: int
    token_ids: Sequence[int]  # prompt, then output; grows
    num_prompt: int
    mask: Tensor | None = None  # a guide's: bits of the allowed tokens, int32 words

    @property
    def flags(self) -> int:
        """Option flags, without the mask's."""
        return PENALTIES * self.params.has_penalties | BIAS * bool(self.params.logit_bias)

    def settings(self) -> dict[str, float]:
        """Values under the field names of `SampleInputs`."""
        params = self.params
        return {
            "seeds": self.seed,
            "top_k": params.top_k,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition": params.repetition_penalty,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
        }

    def seen(self, vocab_size: int) -> Tensor:
        """int32 `[vocabulary]`: how often each token was sampled, and whether the prompt has it."""
        tokens = np.asarray(self.token_ids, dtype=np.int64)
        counts = np.bincount(tokens[self.num_prompt :], minlength=vocab_size).astype(np.int32)
        counts[np.unique(tokens[: self.num_prompt])] += IN_PROMPT
        return torch.from_numpy(counts)

    def bias(self, vocab_size: int) -> Tensor:
        """fp32 `[vocabulary]`."""
        bias = torch.zeros(vocab_size)
        for token, value in self.params.logit_bias.items():
            bias[token] += value
        return bias
