"""Text in, text out: a checkpoint's model together with the tokenizer it was trained with.

    from unbroken.gpt import TextModel
    TextModel.open("runs/a").continue_text("Once upon a time")

``TextFinder`` checks prompts before any weights are read. The text for a prompt does not depend on other prompts: each
has its own RNG.
"""

from dataclasses import dataclass, replace

import torch

from unbroken.errors import GenerationInvalid, SequenceTooLong
from unbroken.gpt.checkpoint import FoundModel, LoadedModel, find_model
from unbroken.gpt.device import chosen_device, chosen_dtype, noticing_full
from unbroken.gpt.generation import generate
from unbroken.gpt.sampling import Generation
from unbroken.gpt.vocabulary import Vocabulary, vocabulary_of


@dataclass(frozen=True)
class Continued:
    """A continued prompt; ``is_ended``: the model ended the text, not the limit on tokens."""

    text: str
    prompt_tokens: int
    new_tokens: int
    is_ended: bool


@dataclass(frozen=True)
class TextFinder:
    """A checkpoint and its tokenizer, found and not loaded."""

    found: FoundModel
    vocabulary: Vocabulary

    @classmethod
    def find(cls, reference: str, tokenizer: str | None = None, *, is_averaged: bool = False) -> "TextFinder":
        """Find a run's model, or the average of its weights, and its tokenizer.

        Raises:
            UnbrokenError: as ``find_model`` and ``vocabulary_of`` raise it.
        """
        found = find_model(reference, is_averaged=is_averaged)
        return cls(found, vocabulary_of(found, tokenizer))

    def encode(self, prompt: str, generation: Generation) -> list[int]:
        """The ids of a prompt that can be continued as asked.

        Raises:
            GenerationInvalid: the prompt is empty.
            SequenceTooLong: prompt and new tokens are more than the model has positions.
        """
        ids = self.vocabulary.encode(prompt)
        if not ids:
            raise GenerationInvalid(problems=("the prompt has no tokens; at least one is needed",))
        positions = self.found.config.model.n_positions
        needed = len(ids) + generation.new_tokens(len(ids), positions) - 1
        if needed > positions:
            raise SequenceTooLong(tokens=needed, positions=positions)
        return ids

    def load(self, device: torch.device, dtype: torch.dtype) -> "TextModel":
        """Read the weights; ``source`` of the result names the checkpoint.

        Raises:
            DamagedCheckpoint: the named checkpoint is damaged.
            NoUsableCheckpoint: none was named, and all are damaged.
            StateDiffers: the weights do not match the config.
            DeviceFull: out of memory on the device.
            StorageFailed: an I/O error.
        """
        with noticing_full(device, "the weights"):
            loaded = self.found.load(device, dtype)
        return TextModel(replace(self, found=loaded.found), loaded)


@dataclass(frozen=True)
class TextModel:
    """A model that continues text."""

    source: TextFinder
    loaded: LoadedModel

    @classmethod
    def open(
        cls,
        reference: str,
        *,
        tokenizer: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        ema: bool = False,
    ) -> "TextModel":
        """The model of a run's newest checkpoint, or of the one that is named (``runs/a@1000``).

        Args:
            reference: a run, a step of it, or a checkpoint's path.
            tokenizer: where it is not the one that the run kept.
            device: as torch names it; None takes the GPU, where there is one.
            dtype: fp32, fp16 or bf16; None takes bf16 on a GPU and fp32 on a CPU.
            ema: take the average of the weights, where the run keeps one.

        Raises:
            DeviceMissing: there is no such device.
            UnbrokenError: as ``TextFinder.find`` and ``TextFinder.load`` raise it.
        """
        place = chosen_device(device)
        return TextFinder.find(reference, tokenizer, is_averaged=ema).load(place, chosen_dtype(dtype, place))

    def continue_text(self, prompt: str, generation: Generation | None = None) -> Continued:
        """The text that follows a prompt, or with ``return_full_text`` the prompt and it.

        Raises:
            GenerationInvalid: the prompt is empty.
            SequenceTooLong: prompt and new tokens are more than the model has positions.
            LogitsNotFinite: the logits are NaN or Inf.
            DeviceFull: out of memory on the device.
        """
        wanted = generation or Generation()
        ids = self.source.encode(prompt, wanted)
        vocabulary = self.source.vocabulary
        model = self.loaded.model
        most = wanted.new_tokens(len(ids), model.config.n_positions)
        with noticing_full(model.embedding.weight.device, "the text"):
            new = generate(
                model,
                ids,
                max_new_tokens=most,
                sampling=wanted.sampling(),
                seed=wanted.seed,
                stop_tokens=(vocabulary.identity.eod_id,),
                known_tokens=vocabulary.identity.vocab_size,
            )
        text = vocabulary.decode_after(ids, new)
        shown = prompt + text if wanted.return_full_text else text
        return Continued(shown, len(ids), len(new), is_ended=len(new) < most)
