"""Random small models on random meshes under random plans.

A model is grown line by line: each line is run on real tensors as soon as it is drawn, and kept only where torch
accepts it and its numbers are tame. All choices are drawn from a ``random.Random``: a seeded one, or one of
hypothesis's.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from model_cases import HEAD, Case
from random_lines import FAMILIES, SLOT
from random_modules import MODULES
from torch import nn

from autopar.capture.naming import names_of

NAME = re.compile(r"\b[a-z]\d+\b")
LARGEST, MOST = 50.0, 600  # of a value's elements: the magnitude, the number
SIZES = (2, 4, 3, 6, 1, 5, 8)
AXES = ("dp", "tp", "cp")


class Models:
    """Grows one case.

    Attributes:
        reals, masks, whole: the names of values of each kind, oldest first; ``env`` has what they hold.
        bounds: name of a tensor of whole numbers → what they are below.
        named: the tensors among the inputs → what plans call them; ``numbers``: the inputs that are no tensors.
        attributes: those of the model that hold numbers and flags, which change between calls → values that they take.
        draws: whether a line draws random numbers.
        returned: submodule → what it returned, and the shape of that.
    """

    def __init__(self, r: random.Random) -> None:
        self.r = r
        self.env: dict[str, Any] = {}
        exec(HEAD, self.env)
        self.owner = self.env["self"] = nn.Module()
        self.init: list[str] = []
        self.lines: list[str] = []
        self.inputs: dict[str, str] = {}
        self.named: dict[str, str] = {}
        self.numbers: list[str] = []
        self.attributes: dict[str, tuple[str, ...]] = {}
        self.shapes: dict[str, str] = {}
        self.reals: list[str] = []
        self.masks: list[str] = []
        self.whole: list[str] = []
        self.bounds: dict[str, int] = {}
        self.returned: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.result = ""
        self.draws = False
        self.count = 0
        self.sizes = [self.size() for _ in range(3)]

    # -- choices ---------------------------------------------------------------------------------------------------

    def chance(self, percent: int) -> bool:
        return self.r.randrange(100) >= 100 - percent

    def size(self) -> int:
        return SIZES[min(self.r.randrange(len(SIZES)), self.r.randrange(len(SIZES)) + 1)]

    def pick(self, names: Sequence[str]) -> str | None:
        """One of the names, rather a late one."""
        if not names:
            return None
        return self.r.choice(names[-3:] if self.chance(60) else names)

    def real(self, fits: Callable[[torch.Tensor], bool] = lambda value: True) -> str | None:
        return self.pick([name for name in self.reals if fits(self.value(name))])

    def value(self, name: str) -> torch.Tensor:
        return eval(name, self.env)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.value(name).shape)

    # -- growth ----------------------------------------------------------------------------------------------------

    def name(self, letter: str = "v") -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def add_init(self, line: str) -> bool:
        try:
            exec(line, self.env)
        except Exception:
            return False
        self.owner.double()
        self.init.append(line)
        return True

    def parameter(self, *shape: int) -> str:
        """A parameter of this shape: one that is there, or a new one."""
        same = [
            f"self.{name}" for name, p in self.owner.named_parameters() if "." not in name and tuple(p.shape) == shape
        ]
        if same and self.chance(30):
            return self.r.choice(same)
        name = self.name("p")
        values = f"torch.randn({', '.join(map(str, shape))}) * 0.5" if shape else "torch.tensor(0.5)"
        self.add_init(f"self.{name} = nn.Parameter({values})")
        if self.chance(8):
            self.add_init(f"self.{name}.requires_grad_(False)")
        self.reals.append(f"self.{name}")
        return f"self.{name}"

    def input(self, text: str, bound: int = 0) -> str:
        name = self.name("abcdefghijk"[min(len(self.inputs), 10)])
        self.env[name] = eval(text, self.env)
        self.inputs[name] = text
        if isinstance(self.env[name], float):
            self.numbers.append(name)
        elif isinstance(self.env[name], dict):
            self.reals += [f'{name}["x"]', f'{name}["y"][0]']
            self.named |= {f'{name}["x"]': f"{name}_x", f'{name}["y"][0]': f"{name}_y_0"}
        else:
            self.take(name, bound)
            self.named[name] = name
        return name

    def take(self, name: str, bound: int = 0) -> None:
        value = self.env[name]
        if value.dtype == torch.bool:
            self.masks.append(name)
        elif value.dtype == torch.int64:
            self.whole.append(name)
            self.bounds[name] = bound
        elif value.dtype == torch.float64:
            self.reals.append(name)

    def add(self, line: str, *made: str) -> bool:
        """Keep a line where it runs, and what it makes is tame."""
        before = {name: self.env.get(name) for name in made}
        try:
            exec(line, self.env)
            tame = all(self._tame(self.env[name]) for name in made)
        except Exception:
            tame = False
        if not tame:
            self.env |= {name: value for name, value in before.items() if value is not None}
            return False
        self.lines.append(line)
        for name in made:
            self.take(name)
            self.shapes[name] = stand_in(self.env[name])
        return True

    def _tame(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.numel() > MOST or not (value.numel() or self.chance(5)):
            return False
        if value.dtype not in (torch.float64, torch.bool, torch.int64):
            return False
        value = value.detach()
        return (
            not value.is_floating_point()
            or not value.numel()
            or bool(value.isfinite().all() and value.abs().max() <= LARGEST)
        )

    def attribute(self) -> None:
        """A number, a flag, a word, an option in a dict or in a config: what annealing, warming up and switching off
        change."""
        name, key = f"self.{self.name('n')}", ""
        kind = self.r.randrange(6)
        values = (
            ("0.5", "-1.0", "2.0", "0.0", "1", "True")
            if kind < 3
            else ("True", "False")
            if kind == 3
            else ("'a'", "'b'")
            if kind == 4
            else ("0", "1", "2")
        )
        value = self.r.choice(values)
        if kind == 1:
            key = '["c"]'
            self.add_init(f'{name} = {{"c": {value}, "d": [1]}}')
        elif kind == 2:
            key = ".first"
            self.add_init(f"{name} = Out({value})")
        else:
            self.add_init(f"{name} = {value}")
        self.attributes[name + key] = values

    def floats(self) -> list[str]:
        return [name for name, values in self.attributes.items() if "0.5" in values]

    def switched(self) -> None:
        """Lines that depend on attributes."""
        for name, values in self.attributes.items():
            x, v = self.real(), self.name()
            forms = {"0.5": [f"{x} * {name}", f"{x} * (1 - {name}) + {name}", f"{x} / ({name} * {name} + 1)",
                             f"{x} if {name} > 0.2 else -{x}", f"F.dropout({x}, max({name}, 0) * 0)"],
                     "True": [f"{x} * 2 if {name} else {x}", f"{x}.tanh() if not {name} else {x}"],
                     "'a'": [f"{x}.sin() if {name} == 'a' else {x}.cos()"],
                     "0": [f"[{x}, -{x}, {x}.abs()][{name}]", f"{x} + {name}"]}  # fmt: skip
            self.add(f"{v} = {self.r.choice(next(some for value, some in forms.items() if value in values))}", v)

    def changes(self) -> tuple[str, ...]:
        """What changes before each later call."""
        if not self.attributes:
            return ()
        often = self.r.choice(list(self.attributes))
        names = [
            often if self.chance(60) else self.r.choice(list(self.attributes))
            for _ in range(self.r.choice([1, 2, 3, 4]))
        ]
        return tuple(f"{name} = {self.r.choice(self.attributes[name])}" for name in names)

    def grow(self) -> None:
        names = [*FAMILIES, *MODULES]
        weights = [weight for weight, _ in (*FAMILIES.values(), *MODULES.values())]
        chosen = names[_weighted(self.r, weights)]
        if chosen in MODULES:
            MODULES[chosen][1](self)
            return
        template = self.r.choice(FAMILIES[chosen][1])
        self.draws |= chosen == "random"
        filled = self.filled(template)
        if filled is not None:
            name = self.name()
            line = filled.replace("{v}", name) if "{v}" in filled else f"{name} = {filled}"
            self.add(line, name)

    def filled(self, template: str) -> str | None:
        """A template with its slots filled; ``None`` where nothing fits one."""
        found: dict[str, Any] = {
            "v": "{v}",
            "c": self.r.choice(["0.5", "-1.0", "2.0", "0.0", *self.numbers, *self.floats()]),
            "k": self.chance(50),
        }
        main = next((slot for slot in SLOT.findall(template) if re.fullmatch(r"x\d?|e\d", slot)), None)
        assert main is not None, template
        least, exact = (int(main[1:] or 0), False) if main[0] == "x" else (int(main[1:]), True)
        x = self.real(lambda value: value.ndim == least if exact else value.ndim >= least)
        if x is None:
            return None
        value = self.value(x)
        found |= {slot: x for slot in SLOT.findall(template) if re.fullmatch(r"x\d?|e\d", slot)}
        dims = list(range(value.ndim))
        d = self.r.choice(dims) if dims else 0
        n = value.shape[d] if dims else 1
        signed = lambda dim: dim - value.ndim if self.chance(30) else dim  # noqa: E731
        found |= {"d": signed(d), "n": n, "d2": self.r.choice(dims) if dims else 0}
        found["dd"] = tuple(self.r.sample(dims, self.r.randrange(1, len(dims) + 1))) if dims else ()
        if not value.numel() and SLOT.search(template) and re.search(r"\{(at|at0|i|i0|i1)\}", template):
            return None
        for slot in dict.fromkeys(SLOT.findall(template)):
            if slot in found:
                continue
            if slot == "y":
                found[slot] = self.real(lambda other: _broadcasts(other.shape, value.shape))
            elif slot == "s":
                found[slot] = self.real(lambda other: other.shape == value.shape)
            elif slot == "m":
                mask = self.pick(
                    [name for name in self.masks if _broadcasts(self.shape(name), value.shape, enlarge=False)]
                )
                other = self.real(lambda other: _broadcasts(other.shape, value.shape, enlarge=False))
                found[slot] = mask if mask is not None and self.chance(70) else f"({other} > 0.1)"
            elif slot == "at":
                found[slot] = self.r.randrange(n)
            elif slot == "at0":
                found[slot] = self.r.randrange(value.shape[-1])
            else:
                size = n if slot == "i" else value.shape[int(slot[1])]
                given = self.pick(
                    [name for name in self.whole if 0 < self.bounds[name] <= size and self.value(name).ndim == 1]
                )
                found[slot] = (
                    given
                    if given is not None and self.chance(60)
                    else f"torch.tensor({[self.r.randrange(size) for _ in range(self.r.randrange(1, 4))]})"
                )
        return None if None in found.values() else SLOT.sub(lambda match: str(found[match[1]]), template)

    # -- what is around the model ----------------------------------------------------------------------------------

    def returns(self) -> tuple[str, int]:
        """What forward returns, and how many tensors that is."""
        made = [name for name in self.env if re.fullmatch(r"v\d+", name) and isinstance(self.env[name], torch.Tensor)]
        made = [name for name in made if name in self.reals or name in self.masks or name in self.whole]
        pool = made or self.reals
        text = "\n".join(self.lines)
        unread = [name for name in pool if len(re.findall(rf"\b{name}\b", text)) == 1]
        names = [pool[-1], *(self.r.choice(pool) for _ in range(self.r.randrange(3)))]
        if self.chance(50):
            names = [*names, *(name for name in unread if name not in names)][-6:]
        if self.chance(8):
            names.append(self.r.choice([*self.named, *self.reals]))
        if len(names) == 1 and self.chance(70):
            return names[0], 1
        shown = ", ".join(names)
        forms = [f"({shown},)", f"[{shown}]",
                 "{" + ", ".join(f'"{k}": {name}' for k, name in zip("zyxwvuts", names, strict=False)) + "}",
                 f"Out({names[0]}, "
                 f"[{', '.join(names[1:])}])", f"({shown}, None)",
                 f"({names[0]}, {{'rest': [{', '.join(names[1:])}], 'n': 3}})"]  # fmt: skip
        return self.r.choice(forms), len(names)

    def mesh(self) -> dict[str, int]:
        axes = self.r.sample(AXES, self.r.choice([1, 2, 2, 2, 3]))
        mesh: dict[str, int] = {}
        for axis in axes:
            total = 1
            for size in mesh.values():
                total *= size
            mesh[axis] = self.r.choice([size for size in (2, 2, 3, 4, 1) if size * total <= 8])
        if set(mesh.values()) == {1} and self.chance(70):
            mesh[axes[0]] = 2
        return mesh

    def spec(self, shape: Sequence[int], axes: Sequence[str], percent: int) -> tuple[Any, ...]:
        """How a value of this shape is split."""
        if self.chance(5):
            from torch.distributed.tensor import Replicate, Shard

            dims = self.r.sample(range(len(shape)), len(shape)) + [None] * len(axes)
            return tuple(
                Replicate() if d is None or self.chance(40) else Shard(d) for d, _ in zip(dims, axes, strict=False)
            )
        free, spec = list(axes), []
        for size in shape:
            taken = (
                self.r.sample(free, min(len(free), self.r.choice([1, 1, 1, 2])))
                if free and self.chance(percent)
                else []
            )
            free = [axis for axis in free if axis not in taken]
            parts = [n for n in (2, 3) if size > n and size % n == 0]
            if parts and taken and self.chance(12):
                first = self.r.choice(parts)
                rest = "/".join(taken)
                spec.append(f"({first} -1/{rest})" if self.chance(70) else f"({first}/{rest} -1)")
            else:
                spec.append(None if not taken else taken[0] if len(taken) == 1 else tuple(taken))
        return tuple(spec)

    def read(self) -> set[str]:
        """The values that what is returned is made of."""
        found = set(NAME.findall(self.result))
        for line in reversed(self.lines):
            names = NAME.findall(line)
            if found.intersection(names[:1]):
                found.update(names)
        return found

    def plan(self, axes: Sequence[str]) -> Any:
        kind = self.r.randrange(100)
        if kind < 8:
            return None
        plan: dict[str, Any] = {}
        percent = self.r.choice([50, 80, 30])
        for name, parameter in self.owner.named_parameters():
            if self.chance(70):
                plan[f"*.{name}" if self.chance(30) else name] = self.spec(parameter.shape, axes, percent)
        for name, buffer in self.owner.named_buffers():
            if self.chance(25):
                plan[name] = self.spec(buffer.shape, axes, percent)
        names = names_of(self.owner)
        own = {name for name, _ in (*self.owner.named_parameters(), *self.owner.named_buffers())}
        for name, listed in [*names.through, *((name, name) for name in names.shapes if name not in own)]:
            if self.chance(60) and ":" not in name:
                plan[f"*.{name}"] = self.spec(names.shapes[listed], axes, percent)
        for expression, name in self.named.items() if self.chance(75) else ():
            if self.chance(70):
                plan[name] = self.spec(self.shape(expression), axes, percent)
        read = self.read()
        for name, (value, shape) in self.returned.items():
            if value in read and self.chance(35):
                spec = self.spec(shape, axes, percent)
                plan[f"*.{name}()"] = tuple("?" if entry is None and self.chance(40) else entry for entry in spec)
        if kind < 16 and "tp" in axes:
            return [self.r.choice(["megatron", "megatron+sp", "ddp"]), plan]
        return "ddp" if kind > 96 else plan

    def case(self) -> Case:
        dims = self.r.choice([2, 3, 3, 3, 4, 1, 0]) if self.chance(60) else 3
        sizes = [str(self.r.choice(self.sizes)) for _ in range(dims)]
        self.input(f"real({', '.join([*sizes, *['grad=True'] * self.chance(50)])})")
        for _ in range(self.r.choice([0, 0, 1, 1, 2])):
            shape = ", ".join(str(self.r.choice(self.sizes)) for _ in range(self.r.choice([2, 3, 1])))
            bound = self.r.choice(self.sizes)
            self.input(*self.r.choice([
                (f"real({shape}, grad=True)",), (f"real({shape})",), (f"truth({shape})",),
                (f"whole(0, {bound}, {shape})", bound), (f"turned({shape}, grad=True)",), ("0.7",),
                (f"dict(x=real({shape}, grad=True), y=[real({shape})])",),
            ]))  # fmt: skip
        if self.chance(4):
            self.input(f"real({self.r.choice(['0, ', '2, 0, '])}{self.sizes[0]})")
        if self.chance(60):
            self.parameter(*(self.r.choice(self.sizes) for _ in range(self.r.choice([1, 2, 2, 3]))))
        for _ in range(self.r.choice([1, 1, 2]) if self.chance(30) else 0):
            self.attribute()
        wanted = self.r.choice([1, 2, 3, 4, 6, 8, 10])
        for _ in range(3 * wanted):
            if len(self.lines) < wanted:
                self.grow()
        self.switched()
        self.result, count = self.returns()
        mesh = self.mesh()
        options: dict[str, Any] = {}
        if self.chance(12):
            options["outputs"] = "global"
        if self.chance(4):
            options["strict"] = True
        if self.draws:
            options["random"] = "single"  # the numbers of one device
        names = list(self.inputs)
        keywords = tuple(names[self.r.randrange(len(names) + 1) :]) if self.chance(15) else ()
        given = (
            tuple(sorted(self.r.sample(range(count), self.r.randrange(1, count + 1))))
            if count > 1 and self.chance(40)
            else None
        )
        changes = self.changes()
        return Case(tuple(self.lines), self.result, self.inputs, mesh, self.plan(list(mesh)), tuple(self.init),
                    keywords, training=not self.chance(8), grad=not self.chance(5),
                    calls=1 + len(changes) if changes else 2 if self.chance(8) else 1,
                    loss="sum" if self.chance(20) else "weights", given=given, options=options, changes=changes,
                    shapes=self.shapes)  # fmt: skip


def _weighted(r: random.Random, weights: Sequence[int]) -> int:
    at = r.randrange(sum(weights))
    for k, weight in enumerate(weights):
        at -= weight
        if at < 0:
            return k
    raise AssertionError


def _broadcasts(shape: Sequence[int], to: Sequence[int], enlarge: bool = True) -> bool:
    try:
        both = torch.broadcast_shapes(shape, to)
    except RuntimeError:
        return False
    return enlarge or both == tuple(to)


def stand_in(value: torch.Tensor) -> str:
    """An input of the same kind and shape."""
    shape = "".join(f", {n}" for n in value.shape)
    if value.dtype == torch.bool:
        return f"truth({shape[2:]})"
    value = value.detach()
    if value.dtype == torch.int64:
        low, high = (int(value.min()), int(value.max())) if value.numel() else (0, 0)
        return f"whole({low}, {high + 1}{shape})"
    if value.numel() and value.min() >= 0:
        return f"shaped({float(value.min()):.3g}, {float(value.max()):.3g}{shape}).requires_grad_()"
    return f"real({shape[2:]}{', ' * bool(shape)}grad=True)"


def random_case(r: random.Random) -> Case:
    """One case; its numbers and its layers' values do not depend on what was drawn before."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Models(r).case()
