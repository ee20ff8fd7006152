"""Run the ``generate`` of transformers on a model whose calls are a captured prefill and a captured decoding step.

The loop is transformers': logits processors, sampling, stopping. Each rank runs it, with whole logits and the same
random numbers, so that each has the same tokens. What is called for each token is a program that was captured once: the
number of tokens so far is one of its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.capture.arguments import bind_arguments
from autopar.capture.model_state import model_state
from autopar.capture.model_swap import ONE_AT_A_TIME
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.program import Program
from autopar.model.calls import Calls
from autopar.model.generation.bound import Bound
from autopar.model.generation.mesh_cache import MeshCache
from autopar.model.generation.refused import option, refuse_model, refuse_options
from autopar.model.wrappers import never_traced
from autopar.runtime.processes.agreement import Brought
from autopar.runtime.seeds import generators_of

DEFAULT = 20  # tokens that transformers adds to a prompt where nothing says how many
INPUTS = ("input_ids", "attention_mask", "position_ids")
ASIDE = ("use_cache", "return_dict", "logits_to_keep")  # what transformers passes besides, and the programs know


class Generation:
    """The generation of a model's tokens: its programs, and the cache of the last call. Prints as a sentence.

    Attributes:
        cache: the layouts and the pieces of the cache; ``None`` before the first call.
    """

    def __init__(self, calls: Calls) -> None:
        from autopar.model.generation.hosts import cache_keyword, decoding, host, prefilling

        module = calls.module
        refuse_model(module)
        self._calls, self._keyword = calls, cache_keyword(module)
        self._hosts = prefilling(module), decoding(module)
        self._prefilling, self._decoding = map(calls.of_host, self._hosts)
        self._host = host(module, __call__=lambda host, **given: self._called(**given))
        self._prefill: Bound | None = None
        self._decode: Bound | None = None
        self._options: Mapping[str, Any] = {}
        self._simulates = False
        self.cache: MeshCache | None = None

    # -- what was captured ---------------------------------------------------------------------------------------

    @property
    def captures(self) -> int:
        """The number of captured calls: prefills and decoding steps."""
        return sum(len(calls.captures.traces) for calls in (self._prefilling, self._decoding))

    @property
    def prefill(self) -> Program:
        """The explicit program that reads the prompt. ``RuntimeError`` before a call."""
        return _made(self._prefill).program

    @property
    def decode(self) -> Program:
        """The explicit program that reads one token. ``RuntimeError`` before a call of more than one token."""
        return _made(self._decode).program

    @property
    def cache_bytes(self) -> int:
        """The bytes of the cache on this rank; on the first rank where ranks are simulated."""
        job = self._calls.job
        return 0 if self.cache is None else self.cache.bytes(self._calls.mesh.ranks[0] if job is None else job.rank)

    def __repr__(self) -> str:
        held = "nothing generated yet" if self.cache is None else f"{self.cache}, {self.cache_bytes:,} bytes on a rank"
        return f"{held}; captures: {self.captures}"

    # -- the loop ------------------------------------------------------------------------------------------------

    def generate(self, inputs: torch.Tensor | None, options: Mapping[str, Any], simulates: bool) -> Any:
        """Return what the model's own ``generate`` returns. All ranks call it.

        Raises:
            ValueError: an option is not done on a mesh.
            RuntimeError: the ranks have different tokens.
        """
        calls, module = self._calls, self._calls.module
        refuse_options(options, module)
        if any(own.compiler.homes != calls.captures.settled() for own in (self._prefilling, self._decoding)):
            self._prefilling, self._decoding = map(calls.of_host, self._hosts)  # the parameters have moved
        self._prefill = self._decode = self.cache = None
        self._options, self._simulates = options, simulates
        if option("do_sample", options, module):
            self._share_random_numbers()
        try:
            returned = self._host.generate(inputs, **{**options, "use_cache": True})
        finally:
            if self.cache is not None:
                self.cache.tensors = []  # of no use any more; types and bytes stay
        if isinstance(returned, dict) and self._keyword in returned:
            returned[self._keyword] = None  # it is on the mesh, and gone
        return returned

    def _share_random_numbers(self) -> None:
        """Continue on all ranks with the generator of the first one."""
        ranks = self._calls.agreement.ranks
        if ranks is None or self._simulates:
            return
        generators = generators_of(self._calls.device)
        states = ranks.gathered([generator.get_state() for generator in generators])[0]
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    @torch.no_grad()
    def _called(self, **given: Any) -> Any:
        """Answer transformers' call of the model: with the logits of the last token, and its own empty cache."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        marker = given.pop(self._keyword, None)
        tensors = {name: given.pop(name) for name in INPUTS if given.get(name) is not None}
        others = [name for name, value in given.items() if value is not None and name not in ASIDE]
        if others:
            raise ValueError(
                f"generation on a mesh has no {', '.join(others)}: its programs take {', '.join(INPUTS)}; leave "
                f"{'it' if len(others) == 1 else 'them'} out, or call the model's own generate on a single device"
            )
        logits = self._read_prompt(tensors) if self.cache is None else self._read_token(tensors)
        return CausalLMOutputWithPast(logits=logits, **{self._keyword: marker})

    def _read_prompt(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        rows, length = tensors["input_ids"].shape
        self._announce(f"generate: read a prompt of {rows} × {length} tokens", tensors)
        bound = self._prefill = self._bound(self._prefilling, tensors)
        logits, *new = bound([*tensors.values()])
        self.cache = MeshCache.for_rows(bound, new, self._calls.mesh, self._room(length))
        self.cache.write(bound, new)
        return bound.full(logits, 0)

    def _read_token(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        cache = self.cache
        assert cache is not None
        if tensors["input_ids"].shape[1] != 1 or cache.length >= cache.room:
            raise RuntimeError(
                f"generation on a mesh reads one token after the other, and has room for {cache.room} tokens, of which "
                f"{cache.length} are there; transformers asks for {tensors['input_ids'].shape[1]} more: give "
                f"max_new_tokens"
            )
        self._announce(f"generate: read token {cache.length}", tensors)
        if "attention_mask" in tensors:  # later tokens do not count: they are behind the token that asks
            mask = tensors["attention_mask"]
            missing = cache.room - mask.shape[1]
            tensors["attention_mask"] = torch.nn.functional.pad(mask, (0, missing), value=1)
        device = tensors["input_ids"].device
        given = {**tensors, "length": torch.tensor(cache.length, device=device)}
        if self._decode is None:
            self._decode = self._bound(self._decoding, given, cache)
        logits, *new = self._decode([*given.values(), *cache.tensors])
        cache.write(self._decode, new)
        return self._decode.full(logits, 0)

    def _bound(self, calls: Calls, given: Mapping[str, torch.Tensor], cache: MeshCache | None = None) -> Bound:
        """Return the program for such inputs; capture it first if it is new. All ranks call it."""
        held = {} if cache is None else {"held": cache.tensors}
        with ONE_AT_A_TIME:
            arguments, state = bind_arguments(calls.module, (), {**given, **held}), model_state(calls.module)
            calls.agreement.wait()
            if cache is None:
                return Bound(calls, arguments, state, self._simulates)
            return Bound(calls, arguments, state, self._simulates, cache.attrs, [type.shape for type in cache.types])

    def _announce(self, call: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send the other ranks the call and its tokens: ranks with other tokens all raise."""
        ranks = self._calls.agreement.ranks
        if ranks is not None and not self._simulates:
            brought = [Brought(name, tensor, ()) for name, tensor in tensors.items()]
            ranks.begin(call, brought, "generate")

    def _room(self, length: int) -> int:
        """Return how many tokens the cache must hold for a prompt of ``length``."""
        module = self._calls.module
        new, limit = (option(name, self._options, module) for name in ("max_new_tokens", "max_length"))
        return max(length, length + new if new is not None else limit if limit is not None else length + DEFAULT)


def _made(bound: Bound | None) -> Bound:
    if bound is None:
        raise RuntimeError("nothing was generated yet; call parallel.generate(input_ids, max_new_tokens=…)")
    return bound


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
