"""Answers from the target itself through transformers, for those without a server (GPU or CPU)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipe.choice import NO_TOKEN, TARGET, NotFinite, most_likely
from recipe.data.tokenizer import load_tokenizer
from recipe.model_files.whole_model import load_whole_model
from recipe.prepare.answer import Answer, Sampling
from recipe.prepare.chat_mask import ChatMask
from recipe.prepare.conversation import Chat


class LocalEngine:
    """Batched generation with padding on the left. That a target's recurrent state or kernels do not read the padding
    is tried at the start; where they do, only prompts of exactly the same length share a batch."""

    def __init__(self, path: str, device: str = "auto", dtype: str = "auto", batch_size: int = 16) -> None:
        import torch

        self.torch, self.batch_size = torch, batch_size
        self.device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        if dtype == "auto":
            dtype = "bfloat16" if self.device == "cuda" else "float32"
        self.tokenizer = load_tokenizer(path, field="--model")
        self.model = load_whole_model(path, getattr(torch, dtype), "--model").to(self.device)
        if self.device == "cpu":
            _unwrap_gpu_kernels(self.model)
        mask = ChatMask(self.tokenizer, path)
        self.turns, self.stops = mask.turns, sorted(mask.stops)
        self.equal_lengths = not self._ignores_padding()
        self.name = Path(path).name

    def _ignores_padding(self) -> bool:
        """Whether a padded prompt is answered as it is alone: by its next-token logits and those one step later."""
        short = [i % len(self.tokenizer) for i in range(7, 12)]
        other = [i % len(self.tokenizer) for i in range(20, 93)]  # longer than one chunk of a linear-attention kernel
        alone, padded = self._two_steps([short]), self._two_steps([short, other])
        allowed = 1e-3 if self.model.dtype == self.torch.float32 else 0.1
        return bool(((alone[0] - padded[0]).abs().max() <= allowed * alone[0].std()).item())

    def _two_steps(self, prompts: list[list[int]]) -> Any:
        """Logits of two tokens, the second after the cache was made [prompts, 2, V], float32."""
        width = max(map(len, prompts))
        ids, seen = self._padded(prompts, width)
        keep = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}
        with self.torch.inference_mode():
            out = self.model.generate(input_ids=ids, attention_mask=seen, max_new_tokens=2, min_new_tokens=2, **keep)
        return self.torch.stack(out.logits, dim=1).float()

    def _padded(self, prompts: Sequence[list[int]], width: int) -> tuple[Any, Any]:
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else (self.stops or [0])[0]
        ids = [[pad] * (width - len(p)) + p for p in prompts]
        seen = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        return self.torch.tensor(ids, device=self.device), self.torch.tensor(seen, device=self.device)

    def encode(self, messages: list[dict[str, Any]], tools: list[Any] | None, sampling: Sampling) -> list[int]:
        """Prompt ids, as a server would make them. Raises Drop where the template refuses or loses a turn."""
        given = self.turns.shown.given(Chat(messages, tools), Counter())
        arguments = sampling.template_arguments()
        text = self.turns.render(given.messages, tools, add_generation_prompt=True, **arguments)
        self.turns.shown.check(given.messages, tools, text)
        return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def batches(self, prompts: Sequence[list[int]]) -> Iterator[list[int]]:
        """Positions in ``prompts`` that can be generated together, longest first (memory fails early, if it does)."""
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        batch: list[int] = []
        for i in order:
            full = len(batch) == self.batch_size
            if batch and (full or (self.equal_lengths and len(prompts[i]) != len(prompts[batch[0]]))):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def generate(self, prompts: Sequence[list[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Answer]:
        """One answer for each prompt of one batch, drawn with the prompt's own seed: company does not change it. Raises
        NotFinite, with the prompt's place in the batch."""
        torch, broken = self.torch, _Broken()
        width = max(map(len, prompts))
        ids, seen = self._padded(prompts, width)
        sample: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if sampling.temperature > 0:
            sample["logits_processor"] = [_OwnNoise(torch, sampling.temperature, [sampling.seed + s for s in seeds])]
        with torch.inference_mode(), broken.noted(self.model):
            out = self.model.generate(
                input_ids=ids,
                attention_mask=seen,
                max_new_tokens=sampling.max_tokens,
                eos_token_id=self.stops or None,
                pad_token_id=(self.stops or [0])[0],
                **sample,
            )
        answers = [self._answer(row) for row in out[:, width:].tolist()]
        broken.refuse([len(prompt) for prompt in prompts], [answer.completion_tokens for answer in answers])
        return answers

    def _answer(self, ids: list[int]) -> Answer:
        """Cut at the first stop token, which ends the turn and is no part of the text."""
        end = next((i for i, token in enumerate(ids) if token in self.stops), None)
        said = ids if end is None else ids[:end]
        text = self.tokenizer.backend_tokenizer.decode(said, skip_special_tokens=False)
        kept = ids if end is None else ids[: end + 1]
        return Answer({"role": "assistant", "content": text}, end is None, kept, len(kept))


class _Broken:
    """The forwards of a batch whose logits were not finite in some row, looked at only when the answers are there."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    @contextmanager
    def noted(self, model: Any) -> Iterator[None]:
        """The model's own logits: what `generate` makes of them may hold -inf for tokens that must not be said."""
        hook = model.register_forward_hook(
            lambda _module, _arguments, output: self.steps.append(most_likely(output.logits[:, -1]) == NO_TOKEN)
        )
        try:
            yield
        finally:
            hook.remove()

    def refuse(self, lengths: Sequence[int], tokens: Sequence[int]) -> None:
        """Raises NotFinite for a row of which one of the first ``tokens`` came from such logits; what is computed for a
        row that has ended counts for nothing."""
        import torch

        for place, flags in enumerate(torch.stack(self.steps, 1).tolist()):
            if True in flags[: tokens[place]]:
                raise NotFinite(TARGET, lengths[place] + flags.index(True), place)


class _OwnNoise:
    """Makes the greedy choice a draw at ``temperature`` from each row's own generator (the Gumbel-max trick).

    Called by `generate` with ids [rows, T] and logits [rows, V].
    """

    def __init__(self, torch: Any, temperature: float, seeds: Sequence[int]) -> None:
        self.torch, self.temperature = torch, temperature
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, ids: Any, logits: Any) -> Any:
        uniform = self.torch.stack([self.torch.rand(logits.shape[-1], generator=one) for one in self.generators])
        noise = -(-uniform.clamp_min(1e-30).log()).log()
        return logits.float() / self.temperature + noise.to(logits.device)


def _unwrap_gpu_kernels(model: Any) -> None:
    """transformers binds fla's GPU kernels whenever fla is installed; its own torch versions stay behind them."""
    module = sys.modules[type(model).__module__]
    for name in (
        "torch_chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule",
        "causal_conv1d_fn",
        "causal_conv1d_update",
    ):
        original = getattr(getattr(module, name, None), "__wrapped__", None)
        if original is not None:
            setattr(module, name, original)
