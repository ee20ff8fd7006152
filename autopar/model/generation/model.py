"""Offer the generation of tokens as methods of a model on a mesh."""

from __future__ import annotations

from typing import Any

import torch

from autopar.ir.mesh import PIPELINE, Mesh
from autopar.model.calls import Calls
from autopar.model.generation.generation import Generation
from autopar.model.wrappers import never_traced


class GeneratingModel:
    """A model on a mesh that generates tokens, if the model is a causal language model of transformers."""

    mesh: Mesh
    _calls: Calls

    @never_traced
    def generate(self, inputs: torch.Tensor | None = None, *, simulate: bool = False, **options: Any) -> Any:
        """Generate tokens, as the ``generate`` of a causal language model of transformers. All ranks call it alike.

            ids = parallel.generate(input_ids, attention_mask=mask, max_new_tokens=64, do_sample=True)

        Returns what the model's own ``generate`` returns on a single device, whole on each rank. The keys and values of
        the tokens so far are on the mesh: each rank keeps its pieces. Two programs are captured, one that reads the
        prompt, and one that reads a token; ``parallel.generation`` has them. Sampling draws the numbers of the first
        rank's generator.

        Args:
            inputs: ids of the prompts, [batch, tokens]; of different lengths with an ``attention_mask`` and padding on
                the left.
            simulate: run all ranks in this process.
            options: those of the model's ``generate``. Beam search, assisted decoding, caches of your own and others
                are refused.

        Raises:
            TypeError: the model has no ``generate`` of transformers, or a cache that is not done.
            ValueError: an option is refused.
            RuntimeError: ranks have different tokens; the process is alone and ``simulate`` is false.
        """
        calls = self._calls
        if simulate:
            calls.binding.refuse_to_simulate()
        else:
            calls.ranks.membership.check()
            calls.context(", or call generate(…, simulate=True)")
        if calls.binding.passed == "local":
            raise ValueError(
                'each rank generates the same tokens, so generate needs inputs="global", the default of parallelize, '
                'and not "local"'
            )
        if self.mesh.sizes.get(PIPELINE, 1) > 1:
            raise ValueError(
                f"the mesh ({self.mesh}) has the stages of a pipeline, and generate is not done on stages; load the "
                f"weights into a model on a mesh without pp: parallelize(model, Mesh(tp={self.mesh.size}))"
            )
        calls.complete()
        return calls.once(Generation).generate(inputs, options, simulate)

    @property
    def generation(self) -> Generation | None:
        """The programs and the cache of ``generate``, with ``prefill``, ``decode``, ``cache`` and ``cache_bytes``.

        ``None`` before the first call. Prints as a sentence.
        """
        return self._calls.made(Generation)
