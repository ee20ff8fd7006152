"""Layers, attention, losses and buffers of random models: what takes more than one template to write."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from random_models import Models


KNOWN = ("q_proj", "o_proj", "fc1", "fc2", "qkv_proj", "lin1", "lin2", "up_proj", "down_proj", "c_proj")  # to presets


WRAPPED = (  # what is done to a layer that has a weight
    "nn.utils.parametrizations.weight_norm({l})", "nn.utils.parametrizations.weight_norm({l}, dim=1)",
    "nn.utils.parametrizations.spectral_norm({l})", "nn.utils.parametrizations.orthogonal({l})",
    "nn.utils.parametrize.register_parametrization({l}, 'weight', nn.Tanh())",
    "{l} = torch.optim.swa_utils.AveragedModel({l})",
)  # fmt: skip


def _layer(m: Models, text: str, x: str, call: str = "{l}({x})", *, again: bool = False) -> str | None:
    """A new layer, or one of the same text that is there, applied to ``x``; the value it makes."""
    same = [line.split(" = ")[0] for line in m.init if line.endswith(f" = {text}")]
    if same and (again or m.chance(40)):
        layer = m.r.choice(same)
    else:
        layer = f"self.{m.name('l')}"
        free = [known for known in KNOWN if not hasattr(m.owner, known)]
        if text.startswith("nn.Linear") and free and m.chance(25):
            layer = f"self.{m.r.choice(free)}"
        if not m.add_init(f"{layer} = {text}"):
            return None
        if text.startswith(("nn.Linear", "nn.Conv")) and m.chance(25):
            m.add_init(m.r.choice(WRAPPED).format(l=layer))
    name = m.name()
    if not m.add(f"{name} = {call.format(l=layer, x=x)}", name):
        return None
    if call == "{l}({x})":
        m.returned[layer.removeprefix("self.")] = name, m.shape(name)
    return name


def linear(m: Models) -> None:
    x = m.real(lambda v: v.ndim >= 1 and v.shape[-1] > 0)
    if x is None:
        return
    wide, out = m.shape(x)[-1], m.r.choice(m.sizes)
    kind = m.r.randrange(6)
    if kind < 3:
        _layer(m, f"nn.Linear({wide}, {out}{', bias=False' if m.chance(30) else ''})", x)
    elif kind == 3:
        name = m.name()
        m.add(f"{name} = {x} @ {m.parameter(wide, out)}", name)
    elif kind == 4:
        name = m.name()
        m.add(f"{name} = F.linear({x}, {m.parameter(out, wide)}, {m.parameter(out)})", name)
    else:
        _layer(m, f"nn.Sequential(nn.Linear({wide}, {2 * out}), nn.ReLU(), nn.Linear({2 * out}, {wide}))", x)


def matmul(m: Models) -> None:
    x = m.real(lambda v: v.ndim >= 2 and v.numel() > 0)
    if x is None:
        return
    shape = m.shape(x)
    w = m.parameter(*(shape[:-2] if m.chance(50) else ()), shape[-1], m.r.choice(m.sizes))
    name = m.name()
    letters = "abcde"[: len(shape)]
    forms = [f"torch.matmul({x}, {w})", f"{x} @ {w}"]
    if len(m.shape(w)) == 2:
        forms += [f'torch.einsum("{letters},{letters[-1]}z->{letters[:-1]}z", {x}, {w})',
                  f'torch.einsum("{letters},{letters[-1]}z->z{letters[0]}", {x}, {w})', f"torch.tensordot({x}, {w}, 1)",
                  f"torch.einsum('...i,io->o...', {x}, {w})"]  # fmt: skip
    if len(m.shape(w)) == 3:
        forms += [f"torch.bmm({x}, {w})", f"torch.baddbmm({m.parameter(m.shape(w)[-1])}, {x}, {w}, beta=0.5)"] * 2
    m.add(f"{name} = {m.r.choice(forms)}", name)


def bilinear(m: Models) -> None:
    x = m.real(lambda v: v.ndim >= 2)
    y = x and m.real(lambda v: v.shape[:-1] == m.value(x).shape[:-1])
    if x and y:
        _layer(m, f"nn.Bilinear({m.shape(x)[-1]}, {m.shape(y)[-1]}, {m.r.choice(m.sizes)})", x, f"{{l}}({{x}}, {y})")


def normalization(m: Models) -> None:
    x = m.real(lambda v: v.ndim >= 2 and v.numel() > 0)
    if x is None:
        return
    shape = m.shape(x)
    forms = [f"nn.LayerNorm({shape[-1]})", f"nn.RMSNorm({shape[-1]})", f"nn.LayerNorm({list(shape[-2:])})",
             "nn.PReLU()", f"nn.GroupNorm({m.r.choice([n for n in (1, 2, 3) if shape[1] % n == 0])}, "
             f"{shape[1]})", f"nn.PReLU({shape[1]})"]  # fmt: skip
    if len(shape) in (2, 3):
        option = m.r.choice(["", ", affine=False", ", momentum=0.3", ", track_running_stats=False"])
        forms += [f"nn.BatchNorm1d({shape[1]}{option})"] * 2
    if len(shape) == 4:
        forms += [f"nn.BatchNorm2d({shape[1]})", f"nn.InstanceNorm2d({shape[1]}, affine=True)"] * 2
    _layer(m, m.r.choice(forms), x)


def attention(m: Models) -> None:
    x = m.real(lambda v: v.ndim == 3 and v.numel() > 0)
    if x is None:
        return
    _, length, wide = m.shape(x)
    heads = m.r.choice([n for n in (1, 2, 3, 4) if wide % n == 0])
    kind = m.r.randrange(6)
    if kind == 0:
        call = m.r.choice(["{l}({x}, {x}, {x})[0]", "{l}({x}, {x}, {x}, need_weights=False)[0]"])
        _layer(m, f"nn.MultiheadAttention({wide}, {heads}, batch_first=True)", x, call)
        return
    if kind == 1:
        drop = m.r.choice(["0.0", "0.2"])
        m.draws |= drop != "0.0"
        _layer(m, f"nn.TransformerEncoderLayer({wide}, {heads}, {2 * wide}, dropout={drop}, batch_first=True)", x)
        return
    groups = m.r.choice([n for n in (1, 1, 2) if heads % n == 0])
    other = (
        m.real(lambda v: v.ndim == 3 and v.shape[0] == m.value(x).shape[0] and v.shape[2] == wide)
        if m.chance(25)
        else x
    )
    each = wide // heads
    made = []
    for of, count in ((x, heads), (other, heads // groups), (other, heads // groups)):
        projected = (
            _layer(m, f"nn.Linear({wide}, {count * each}, bias={m.chance(50)})", str(of))
            if m.chance(80) or count != heads
            else of
        )
        name = m.name()
        if projected is None or not m.add(
            f"{name} = {projected}.unflatten(-1, ({count}, {each})).transpose(1, 2)", name
        ):
            return
        made.append(name)
    options = [", is_causal=True", "", f", scale={m.r.choice(['0.5', '1.0'])}"]
    second = m.shape(made[1])[2]
    options.append(f", attn_mask=torch.ones({length}, {second}, dtype=torch.bool).tril()")
    options.append(f", attn_mask={m.parameter(length, second)}")
    options.append(f", attn_mask=({m.parameter(heads, 1, second)} > -9)")
    name = m.name()
    if m.chance(10):
        options.append(", dropout_p=0.3")
        m.draws = True
    call = (
        f"F.scaled_dot_product_attention({', '.join(made)}{m.r.choice(options)}"
        f"{', enable_gqa=True' if groups > 1 else ''})"
    )
    if m.chance(25) and groups == 1:
        call = f"({made[0]} @ {made[1]}.mT / {math.sqrt(each):.3f}).softmax(-1) @ {made[2]}"
    if m.add(f"{name} = {call}", name):
        last = m.name()
        m.add(
            f"{last} = {name}.transpose(1, 2).{m.r.choice(['flatten(2)', f'reshape(*{name}.shape[:1], -1, {wide})'])}",
            last,
        )


def convolution(m: Models) -> None:
    x = m.real(lambda v: v.ndim in (3, 4) and v.numel() > 0)
    if x is None:
        return
    shape = m.shape(x)
    n, wide = len(shape) - 2, shape[1]
    groups = m.r.choice([g for g in (1, 1, 2, wide) if wide % g == 0])
    out = groups * m.r.choice([1, 2, 3])
    options = (("stride", [2, 1]), ("padding", [1, 0, 2]), ("dilation", [1, 2]), ("bias", [False]))
    more = "".join(f", {key}={m.r.choice(values)}" for key, values in options if m.chance(35))
    kind = m.r.randrange(8)
    if kind < 5:
        _layer(m, f"nn.Conv{n}d({wide}, {out}, {m.r.choice([1, 2, 3])}, groups={groups}{more})", x)
    elif kind == 5:
        _layer(
            m,
            f"nn.ConvTranspose{n}d({wide}, {out}, {m.r.choice([1, 2, 3])}, groups={groups}, "
            f"stride={m.r.choice([1, 2])})",
            x,
        )
    else:
        pools = (
            "AvgPool{}d(2)",
            "MaxPool{}d(2)",
            "MaxPool{}d(3, stride=1, padding=1)",
            "AdaptiveAvgPool{}d(1)",
            "AdaptiveMaxPool{}d(2)",
            "AvgPool{}d(2, 1, count_include_pad=False, padding=1)",
        )
        _layer(m, f"nn.{m.r.choice(pools).format(n)}", x)


def _ids(m: Models, below: int, *shape: int) -> str:
    """Whole numbers of this shape, each below ``below``."""
    fits = [name for name in m.whole if 0 < m.bounds[name] <= below and m.shape(name) == shape]
    return (
        m.r.choice(fits)
        if fits and m.chance(70)
        else m.input(f"whole(0, {below}{''.join(f', {n}' for n in shape)})", below)
    )


def embedding(m: Models) -> None:
    rows, wide = m.r.choice([4, 5, 6, 8, 11]), m.r.choice(m.sizes)
    fits = [name for name in m.whole if 0 < m.bounds[name] <= rows]
    ids = (
        m.r.choice(fits)
        if fits and m.chance(70)
        else _ids(m, rows, *(m.r.choice(m.sizes) for _ in range(m.r.choice([2, 1]))))
    )
    kind = m.r.randrange(8)
    if kind < 4:
        made = _layer(m, f"nn.Embedding({rows}, {wide}{', padding_idx=1' if m.chance(30) else ''})", ids)
        if made and m.chance(40):
            layer = m.lines[-1].split(" = ")[1].split("(")[0]
            head = m.name("l")
            name = m.name()
            if m.add_init(f"self.{head} = nn.Linear({wide}, {rows}, bias=False)") and m.add_init(
                f"self.{head}.weight = {layer}.weight"
            ):
                m.add(f"{name} = self.{head}({made})", name)
    elif kind == 4:
        name = m.name()
        m.add(f"{name} = F.embedding({ids}, {m.parameter(rows, wide)})", name)
    elif kind == 5:
        name = m.name()
        m.add(f"{name} = {m.parameter(rows, wide)}[{ids}]", name)
    elif kind == 6 and m.value(ids).ndim == 2:
        _layer(m, f"nn.EmbeddingBag({rows}, {wide}, mode={m.r.choice(['sum', 'mean', 'max'])!r})", ids)
    else:
        name = m.name()
        m.add(f"{name} = F.one_hot({ids}, {rows}).double()", name)


def loss(m: Models) -> None:
    x = m.real(lambda v: v.ndim >= 2 and v.shape[-1] > 0 and v.numel() > 0)
    if x is None:
        return
    shape = m.shape(x)
    flat = m.chance(50) or len(shape) == 2
    scores = x if len(shape) == 2 else f"{x}.flatten(0, -2)" if flat else f"{x}.movedim(-1, 1)"
    kinds = shape[-1]
    target = _ids(m, kinds, *shape[:-1])
    labels = f"{target}.flatten()" if flat and len(shape) > 2 else target
    options = f", reduction={m.r.choice(['mean', 'sum', 'none', 'mean'])!r}"
    if m.chance(25):
        options += f", weight=torch.linspace(0.5, 1.5, {kinds}, dtype=torch.float64)"
    if m.chance(35):
        options += f", ignore_index={m.r.choice([0, 1])}"
    name = m.name()
    kind = m.r.randrange(6)
    if kind < 4:
        m.add(
            f"{name} = F.cross_entropy({scores}, {labels}{options}{', label_smoothing=0.1' if m.chance(30) else ''})",
            name,
        )
    elif kind == 4:
        m.add(f"{name} = F.nll_loss(F.log_softmax({scores}, 1), {labels}{options})", name)
    else:
        m.add(f"{name} = F.cross_entropy({scores}, {scores}.detach().softmax(1))", name)


def buffer(m: Models) -> None:
    """A buffer that is read, and mostly written."""
    x = m.real(lambda v: v.ndim >= 1 and v.numel() > 0)
    if x is None:
        return
    b = f"self.{m.name('b')}"
    shape = m.shape(x)
    kind = m.r.randrange(7)
    width = shape[-1:] if kind in (0, 1, 2) else shape
    if not m.add_init(
        f'self.register_buffer("{b[5:]}", torch.linspace(0.1, 1, '
        f"{math.prod(width)}).view({', '.join(map(str, width))}))"
    ):
        return
    dims = tuple(range(len(shape) - 1))
    reduced = f"{x}.detach().mean({dims})" if dims else f"{x}.detach()"
    update = (
        f"{b}.mul_(0.9).add_(0.1 * {reduced})", f"{b}.copy_({reduced})", f"{b} = {b} * 0.5 + {reduced}",
        f"{b}.add_({x}.detach())", f"{b}.copy_({x}.detach())", f"{b} = {x}.detach() * 2", f"{b}[0] = 1.0",
    )[kind]  # fmt: skip
    name = m.name()
    if m.chance(70):
        m.add(update)
    m.add(f"{name} = {x} * {b}", name)
    if m.chance(30) and update.startswith(f"{b} = "):  # written in place, what was read could not be differentiated
        m.add(update)


def shape_change(m: Models) -> None:
    """A permutation, or another grouping of the elements."""
    x = m.real(lambda v: v.ndim >= 1 and v.numel() > 0)
    if x is None:
        return
    shape = m.shape(x)
    name = m.name()
    if m.chance(40):
        order = m.r.sample(range(len(shape)), len(shape))
        m.add(f"{name} = {x}.permute({order})", name)
        return
    total, new = math.prod(shape), []
    while total > 1 and len(new) < 4:
        new.append(
            m.r.choice(
                [n for n in range(1, total + 1) if total % n == 0 and (n <= 8 or n == total)]
                if len(new) < 3
                else [total]
            )
        )
        total //= new[-1]
    if total > 1:
        new.append(total)
    if new and m.chance(40):
        new[m.r.randrange(len(new))] = -1
    m.add(f"{name} = {x}.{m.r.choice(['reshape', 'reshape', 'view'])}({', '.join(map(str, new)) or '()'})", name)


def recurrent(m: Models) -> None:
    x = m.real(lambda v: v.ndim == 3 and v.shape[1] <= 3 and v.numel() > 0)
    if x is not None:
        kind = m.r.choice(["GRU", "LSTM", "RNN"])
        _layer(m, f"nn.{kind}({m.shape(x)[-1]}, {m.r.choice(m.sizes)}, batch_first=True)", x, "{l}({x})[0]")


def integers(m: Models) -> None:
    """Whole numbers, from some that are there or from masks."""
    source = m.pick([*m.whole, *m.masks])
    if source is None:
        return
    name = m.name()
    forms = ("{}.double() * 0.5", "({} * 2).double()", "({} > 0)", "{}.sum()", "{}.long() + 1", "~{}.bool()",
             "{}.long() % 2 == 0", "{}.flatten()[:2].double()")  # fmt: skip
    m.add(f"{name} = {m.r.choice(forms).format(source)}", name)


MODULES: dict[str, tuple[int, Callable[[Models], Any]]] = {  # how often, and who writes it
    "linear": (6, linear),
    "matmul": (3, matmul),
    "bilinear": (1, bilinear),
    "normalization": (3, normalization),
    "attention": (2, attention),
    "convolution": (2, convolution),
    "embedding": (2, embedding),
    "loss": (3, loss),
    "buffer": (1, buffer),
    "shape": (4, shape_change),
    "recurrent": (1, recurrent),
    "integers": (1, integers),
}
