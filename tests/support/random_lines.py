"""The lines that random models are made of: tables of templates, by what they need.

A template's slots, filled from left to right: ``{x}`` a real tensor; ``{x1}`` … ``{x3}`` one with at least as many
dims, ``{e2}`` … ``{e4}`` with exactly so many; ``{y}`` one that broadcasts with it, ``{s}`` one of its shape; ``{m}`` a
mask that broadcasts with it; ``{d}``, ``{d2}`` two of its dims; ``{dd}`` a tuple of them; ``{n}`` the size of ``{d}``,
``{at}`` an index into it, ``{i}`` a tensor of indices of one dim; ``{k}`` keepdim; ``{c}`` a number.
"""

from __future__ import annotations

import re

SLOT = re.compile(r"\{(\w+)\}")

UNARY = """
    torch.tanh({x}) | torch.sigmoid({x}) | torch.relu({x}) | F.gelu({x}) | F.silu({x}) | F.gelu({x}, approximate="tanh")
    ({x} * 0.1).exp() | {x}.sin() | {x}.cos() | -{x} | {x}.abs() | {x}.square() | ({x}.abs() + 0.5).log() | ({x}.abs() + 0.1).sqrt()
    ({x}.abs() + 0.5).rsqrt() | 1 / ({x}.abs() + 0.5) | F.softplus({x}) | F.elu({x}) | F.leaky_relu({x}, 0.1) | F.hardtanh({x})
    F.mish({x}) | {x}.erf() | {x}.floor() | {x}.round() | {x}.sign() | {x} ** 2 | {x}.clamp(-0.5, 1.0) | {x}.clamp(min=0.1)
    {x}.nan_to_num() | {x}.detach() | {x}.clone() | {x}.contiguous() | {x}.float().double() | F.dropout({x}, 0.0)
    F.dropout({x}, 0.3, training=False) | {x} + {c} | {c} - {x} | {x} * {c} | {x} / {c} | {x}.frac() | {x}.trunc() | {x}.expm1() * 0.1
    {x}.atan() | {x}.asinh() | F.hardswish({x}) | F.selu({x}) | F.celu({x}) | F.softsign({x}) | F.logsigmoid({x})
    F.threshold({x}, 0.1, 0.2) | F.relu6({x}) | F.hardshrink({x}) | {x}.exp2() * 0.1 | torch.sinc({x}) | {x}.sigmoid().logit()
    ({x}.abs() + 0.5).lgamma() | ({x}.abs() + 1).digamma() | ({x}.abs() + 0.5) ** 0.5 | ({x}.abs() + 0.5) ** -1.5 | 2 ** {x}.tanh()
    torch.ones_like({x}) * {x} | {x}.new_full((1,), 3.0) * {x} | torch.zeros_like({x}) + {x} | {x} * {x}.size(-1) if {x}.ndim else {x}
    {x}.real | {x}.remainder(0.7) | {x}.ceil() | checkpoint(lambda t: torch.tanh(t) * t, {x}, use_reentrant=False)
    torch.full_like({x}, {c}) - {x} | {x}.pow(3) * 0.1 | {x}.sinh() * 0.1 | Cube.apply({x}) | torch.vmap(torch.tanh)({x1})
"""  # noqa: E501

BINARY = """
    {x} + {y} | {x} - {y} | {x} * {y} | {x} / ({y}.abs() + 1) | torch.maximum({x}, {y}) | torch.minimum({x}, {y})
    torch.atan2({x}, {y}.abs() + 0.1) | torch.hypot({x}, {y} + 2) | torch.add({x}, {y}, alpha=2) | torch.sub({x}, {y}, alpha=0.5)
    torch.lerp({x}, {y}, 0.3) | torch.addcmul({x}, {y}, {y}, value=0.5) | torch.addcdiv({x}, {x}, {y}.abs() + 1)
    torch.where({m}, {x}, {y}) | {x}.masked_fill({m}, {c}) | torch.where({m}, {x}, {c}) | torch.logaddexp({x}, {y})
    ({x} > {y}).double() * {x} | torch.copysign({x}, {y}) | torch.xlogy({x}, {y}.abs() + 0.5) | torch.where({x} > {y}, {x}, {y})
    {m} * {x} | {x}.clamp(min={y}) | {x}.clamp({y} - 1, {y} + 1) | torch.rsub({x}, {y}) | {x} * {x} + {x} * {y}
    torch.lerp({x}, {y}, torch.sigmoid({x})) | torch.fmod({x}, {y}.abs() + 0.5) | {x} * {m}.logical_not()
    torch.stack(torch.broadcast_tensors({x}, {y}), 0) | F.mse_loss(*torch.broadcast_tensors({x}, {y}))
    torch.remainder({x}, {y}.abs() + 0.5) | torch.heaviside({x}, {y}.detach()).detach() + {x}
"""  # noqa: E501

SAME = """
    torch.cat([{x1}, {s}], {d}) | torch.stack([{x}, {s}]) | torch.stack([{x1}, {s}], {d}) | torch.stack([{x}, {s}, {x}], -1)
    F.l1_loss({x}, {s}) | F.mse_loss({x}, {s}, reduction="sum") | F.smooth_l1_loss({x}, {s}, reduction="none")
    F.huber_loss({x}, {s}, delta=0.5) | torch.cat([{x1}, {s}, {x1}], {d}) | F.cosine_similarity({x1}, {s} + 0.5, dim={d})
    torch.dist({x}, {s} + 1) | F.binary_cross_entropy_with_logits({x}, {s}.sigmoid())
    F.kl_div(F.log_softmax({x1}, {d}), F.softmax({s}, {d}), reduction="sum") | F.glu(torch.cat([{x1}, {s}], {d}), {d})
    F.binary_cross_entropy({x}.sigmoid(), {s}.sigmoid().detach(), reduction="none") | torch.cat([{x1}, {s}.flip({d})], {d}).roll(1, {d})
    torch.cdist({e2}, {s} + 3) | {e2} @ {s}.T | {e2}.T @ {s} | torch.einsum("ab,ab->", {e2}, {s}) | torch.einsum("ab,cb->ac", {e2}, {s})
    torch.einsum("abc,adc->abd", {e3}, {s}) | torch.bmm({e3}, {s}.mT) | torch.baddbmm({e3}.sum(-1, keepdim=True), {e3}, {s}.mT, alpha=0.5)
    {e4} @ {s}.mT | torch.tensordot({x1}, {s}, dims=([{d}], [{d}])) if {x1}.ndim < 3 else {x1} | torch.einsum("abc,abd->cd", {e3}, {s})
    torch.einsum("abc,abc->ab", {e3}, {s}) | torch.dot({e1}, {s}) | torch.outer({e1}, {s}) | torch.mv({e2}, {s}[0])
    torch.inner({e2}, {s}) | torch.addmm({e2} @ {s}.T, {e2}, {s}.T, beta=0.5) | torch.addbmm({e3}[0] @ {s}[0].mT, {e3}, {s}.mT)
    torch.kron({e2}, {s}[:1]) | torch.cross({x1}, {s}, dim={d}) if {n} == 3 else {x1} | torch.linalg.vecdot({x1}, {s})
    torch.cat([{x1}, {s}], {d}).chunk(2, {d})[1] | torch.hstack([{x1}, {s}]) | torch.vstack([{x1}, {s}])
    torch.nn.utils.rnn.pad_sequence([{x1}, {s}[:1]])
"""  # noqa: E501

REDUCE = """
    {x1}.sum({dd}, keepdim={k}) | {x1}.mean({dd}, keepdim={k}) | {x1}.amax({dd}, keepdim={k}) | {x1}.amin({dd}, keepdim={k})
    {x1}.sum({d}) | {x}.sum() | {x}.mean() | {x}.max() | {x}.amin() | {x1}.max({d}, keepdim={k}).values | {x1}.min({d})[0]
    {x1}.var({dd}, correction=0, keepdim={k}) | {x1}.std({d}, correction=0) + 1 | {x1}.var({d}, keepdim={k})
    {x1}.logsumexp({dd}, keepdim={k}) | torch.linalg.vector_norm({x1} + 3, dim={dd}, keepdim={k}) | {x}.norm() | {x1}.norm(p=1, dim={d})
    {x1}.prod({d}) | torch.var_mean({x1}, {d}, correction=0, keepdim=True)[1] | torch.std_mean({x1} * {c}, {d}, correction=0)[1]
    {x1}.argmax({d}, keepdim=True).double() * {x1} | {x1}.median({d}).values | {x1}.all({d}).double()
    ({x1} > 0).any({d}, keepdim=True) * {x1} | ({x1} > {c}).sum({d}).double() | {x1}.count_nonzero({d}).double() | {x1}.cumsum({d})
    {x1}.cumprod({d}) | {x1}.cummax({d}).values | {x1}.logcumsumexp({d}) | {x1}.diff(dim={d}) | {x1}.aminmax(dim={d})[0]
    torch.trapezoid({x1}, dim={d}) | {x1}.quantile(0.3, dim={d}) | {x1}.nansum({d}) | {x1}.kthvalue(1, {d}).values
    {x1}.renorm(2, {d}, 1.0) if {x1}.ndim > 1 else {x1} | {x1}.mode({d}).values | torch.linalg.vector_norm({x1}, ord=math.inf, dim={d})
    {x}.std(correction=0)
"""  # noqa: E501

NORM = """
    {x1}.softmax({d}) | F.log_softmax({x1}, {d}) | F.softmin({x1}, {d}) | F.normalize({x1} + 2, dim={d})
    F.layer_norm({x1}, {x1}.shape[-1:]) | F.layer_norm({x2}, {x2}.shape[-2:]) | F.rms_norm({x1}, {x1}.shape[-1:]) | F.group_norm({x2}, 1)
    F.instance_norm({e3} * 3) if {e3}.shape[-1] > 1 else {e3} | {x1}.masked_fill({m}, -math.inf).softmax({d})
    F.batch_norm({x2}, None, None, training=True) | F.softmax({x1}.masked_fill({m}, torch.finfo(torch.float64).min), {d})
    F.local_response_norm({e3}, 2) | F.group_norm({x2}, {x2}.shape[1]) if {x2}[0, 0].numel() > 1 else {x2}
"""  # noqa: E501

VIEW = """
    {x1}.unsqueeze({d}) | {x}.unsqueeze(-1) | {x}.unsqueeze(0) | {x}.squeeze() | {x1}.squeeze({d}) | {x1}.transpose({d}, {d2}) | {x2}.mT
    {x1}.movedim({d}, {d2}) | {x}.flatten() | {x2}.flatten(0, 1) | {x2}.flatten(1) | {x2}.flatten(-2) | {x}.reshape(-1) | {x}[None]
    {x1}[{at}] | {x1}[-1] | {x1}[..., :2] | {x1}[..., ::2] | {x1}[1:] | {x1}.select({d}, {at}) | {x1}.narrow({d}, {at}, 1)
    {x1}.chunk(2, {d})[-1] | {x1}.split(2, {d})[0] | {x1}.tensor_split(2, {d})[0] | {x1}.unbind({d})[{at}] | {x1}.flip({d})
    {x1}.roll(1, {d}) | {x2}.roll((1, -1), (0, -1)) | {x1}.repeat_interleave(2, {d}) | {x2}.tril() | {x2}.triu(1)
    {x2}.diagonal(dim1=-2, dim2=-1) | torch.diag_embed({x1}) | F.pad({x1}, (1, 2)) | F.pad({x1}, (0, 1), value=1.5)
    F.pad({x2}, (0, 0, 1, 0)) | {x1}.unfold({d}, 1, 1) | {x1}.unfold({d}, 2, 1) if {n} > 1 else {x1} | {x}.expand(2, *{x}.shape)
    {x}.unsqueeze(-1).expand(*{x}.shape, 3) | {x1}.repeat(2, *[1] * {x1}.ndim) | {x1}.repeat(*[1] * ({x1}.ndim - 1), 2) | {x1}.tile((2,))
    {x1}.view({x1}.shape) | {x1}.reshape(*{x1}.shape[:-1], 1, -1) | {x1}.rot90(1, (0, -1)) if {x1}.ndim > 1 else {x1}
    {x2}.reshape({x2}.shape[0], -1) | {x1}.index_select({d}, {i}) | {x2}.permute(*range({x2}.ndim)[::-1])
    torch.take_along_dim({x1}, {x1}.argsort({d}), {d}) | {x1}.sort({d}, descending={k})[0] | {x1}.topk(1, {d})[0] | {x1}.msort()
    {x1}.gather({d}, {x1}.argsort({d}).flip({d})) | {x1}[{i0}] | {x2}[:, {i1}] | {x1}.index_add({d}, {i}, {x1}.index_select({d}, {i}))
    {x1}.index_copy({d}, torch.arange({n}), {x1} * 2)
    {x1}.index_put(({i0},), {x1}[0], accumulate={k}) if not {k} else {x1}.index_put(({i0},), {x1}[0], accumulate=True)
    {x1}.scatter({d}, {x1}.argsort({d}), {x1} * 2) | {x1}.scatter_add({d}, torch.zeros_like({x1}, dtype=torch.long), {x1})
    {x1}.index_fill({d}, {i}, {c}) | {x1}.as_strided({x1}.shape, {x1}.stride()) if {x1}.is_contiguous() else {x1}
    {x1}.masked_scatter({m}, {x1}.flatten().repeat(8)) if {m}.shape == {x1}.shape else {x1} | {x1}.slice_scatter({x1}[:1] * 2, 0, 0, 1)
    {x1}.select_scatter({x1}.select({d}, {at}) + 1, {d}, {at}) | {x2}.swapaxes(0, -1) | {x2}.unflatten(0, (1, -1))
    F.one_hot({x1}.argmax({d}), {n}).double() | {x1}.scatter_reduce({d}, torch.zeros_like({x1}, dtype=torch.long), {x1}, "amax")
    torch.meshgrid({x1}.flatten()[:3], {x1}.flatten()[:2], indexing="ij")[0] | torch.cat([{x1}, {x1}.narrow({d}, 0, 1)], {d})
    {x1}[{i0}, ...].sum(0) | {x2}[{i0}][:, {i1}] | {x2}[{i0}, 0] | {x1}.new_zeros({x1}.shape).index_put(({i0},), {x1}[{i0}])
    {x2}[torch.arange({x2}.shape[0]), torch.arange({x2}.shape[0]) % {x2}.shape[1]] | F.fold(F.unfold({e4}, 1), {e4}.shape[-2:], 1)
    torch.view_as_real(torch.complex({x}, {x} + 1)) | torch.complex({x}, {x} * 2).abs() | torch.fft.rfft({x1}, dim={d}).abs()
    torch.view_as_real(torch.fft.fft({x1}, dim={d})) | (torch.complex({x}, {x}) * torch.complex({x}, -{x})).real
    torch.polar({x}.abs() + 1, {x}).imag | {x1}.masked_select({m}).sum()
    torch.searchsorted(torch.linspace(-2, 2, 5, dtype=torch.float64), {x}.contiguous()).double() + {x}
    torch.bucketize({x}, torch.tensor([-1.0, 0, 1])).double() | {x1}.diagonal_scatter({x1}.diagonal() * 2) if {x1}.ndim == 2 else {x1}
    F.interpolate({e3}, scale_factor=2) | F.avg_pool1d({e3}, 1) | F.max_pool1d({e3}, {e3}.shape[-1]) | F.adaptive_avg_pool1d({e3}, 2)
    F.avg_pool2d({e4}, (1, {e4}.shape[-1])) | F.max_pool2d({e4}, 1) | F.pad({e3}, (1, 0), mode="replicate")
    F.pixel_shuffle({e4}.repeat(1, 4, 1, 1), 2)
"""  # noqa: E501

INPLACE = """
    {v} = {x}.clone(); {v}.add_({c}) | {v} = {x}.clone(); {v}.mul_({x}) | {v} = {x1}.clone(); {v}[0] = {c}
    {v} = {x1}.clone(); {v}[..., {at0}] = {x1}[..., -1] * 2 | {v} = {x} * 1; {v}.relu_() | {v} = {x1}.clone(); {v}[1:].mul_(2)
    {v} = {x}.clone(); {v}.masked_fill_({m}, {c}) if {m}.expand_as({v}).shape == {v}.shape else None
    {v} = {x} + 0; {v}.zero_(); {v} = {v} + {x} | {v} = {x}.clone(); {v}.copy_({x} * 2)
    {v} = {x1}.clone(); {v}.select({d}, {at}).add_(1) | {v} = {x1}.clone(); {v}.index_add_({d}, {i}, {x1}.index_select({d}, {i}))
    {v} = {x1}.clone(); {v}[{i0}] = {c} | {v} = torch.zeros({x1}.shape, dtype=torch.float64); {v}[:1] = {x1}[:1]
    {v} = {x1}.clone(); {v}.unsqueeze(0).mul_(3) | {v} = torch.empty_like({x}); {v}.copy_({x})
    {v} = {x1}.clone(); {v}.flatten()[0].add_(1) | {v} = {x2}.clone(); {v}.diagonal().zero_()
    {v} = {x2}.clone(); {v}.t_() if {v}.ndim == 2 else None | {v} = {x1}.clone(); {v}.narrow({d}, {at}, 1).copy_({x1}.narrow({d}, 0, 1))
    {v} = {x}.clone(); {v}.sub_({s}).abs_() | {v} = {x}.clone(); {v}[{v} > 1] = {c}
    {v} = {x1}.clone(); {v} += {x1}.mean({d}, keepdim=True) | {v} = {x1}.clone(); {v}.index_fill_({d}, {i}, {c})
    {v} = {x1} * 2; {v}.clamp_(max=1.0) | {v} = {x1}.clone(); {v}.scatter_({d}, {x1}.argsort({d}), {x1})
"""  # noqa: E501

MASKS = """
    {x} > {c} | {x} <= {y} | ~({m}) & ({x} < 1) | {m} & ({x} > 0) | torch.isfinite({x}) | {x}.bool() | ({x} > 0).logical_xor({m})
    torch.ones_like({x}, dtype=torch.bool).tril() if {x}.ndim > 1 else {x} > 0 | ({x1} > 0).cumsum({d}) > 1
    {x1}.argmax({d}, keepdim=True) == 0
"""  # noqa: E501

SQUARE = "({x2} @ {x2}.mT + 3 * torch.eye({x2}.shape[-2], dtype=torch.float64))"
ALGEBRA = """
    torch.linalg.inv(A) | torch.linalg.det(A) * 0.01 | torch.linalg.slogdet(A)[1] | torch.linalg.cholesky(A) | torch.linalg.solve(A, {x2})
    torch.linalg.eigvalsh(A) | torch.linalg.svdvals(A) | torch.linalg.matrix_exp(A * 0.05) | torch.linalg.matrix_power(A * 0.2, 2)
    torch.linalg.matrix_norm(A) | torch.linalg.solve_triangular(A, {x2}, upper=False) | torch.linalg.qr(A)[1].abs()
    torch.cholesky_solve({x2}, torch.linalg.cholesky(A)) | torch.linalg.pinv(A) | torch.linalg.eigh(A)[0] | torch.trace({e2})
    torch.cov({e2}) | torch.addr({e2}, {e2}[:, 0], {e2}[0]) | torch.block_diag({e2}, {e2}) | torch.cartesian_prod({e1}, {e1}[:2])
    torch.vander({e1}, 3) | torch.chain_matmul({e2}, {e2}.T, {e2}) | torch.linalg.multi_dot([{e2}, {e2}.T, {e2}])
    torch.einsum("...a,...b->...ab", {x1}, {x1}) | torch.einsum("ab,ab->a", {e2}, {e2})
    torch.einsum("aab->ab", {e3}[:, :1].expand(-1, {e3}.shape[0], -1)) | torch.addmv({e2}[:, 0], {e2}, {e2}[0])
    torch.corrcoef({e2} + torch.eye({e2}.shape[0], {e2}.shape[1], dtype=torch.float64)).nan_to_num()
"""  # noqa: E501

MORE = """
    {x}.i0() * 0.1 | torch.special.entr({x}.sigmoid()) | torch.special.ndtr({x}) | torch.special.erfcx({x}.abs()) | torch.special.i1e({x})
    torch.polygamma(1, {x}.abs() + 1) | {x}.erfinv().detach().nan_to_num(0, 0, 0) | torch.special.log_ndtr({x}) | torch.nansum({x})
    torch.nanmean({x1}, {d}) | {x1}.nanmedian({d}).values | {x1}.cummin({d})[0] | torch.cumulative_trapezoid({x1}, dim={d})
    torch.isclose({x}, {y}).double() | torch.isin({x}.round(), torch.tensor([0.0, 1.0])) | {x}.ldexp(torch.tensor(1.0))
    torch.logaddexp2({x}, {y}) | ({x} * 4).long() % 5 | ({x} * 4).long() & 3 | (({x} * 4).int() << 1).double()
    ({x} * 4).long().bitwise_xor(torch.tensor(5)) | torch.div({x}, 0.7, rounding_mode="floor")
    torch.floor_divide({x}, {y}.abs() + 1).detach() + {x} | ({x} * 3).int().double() | {x}.frexp()[0].detach() + {x}
    torch.gcd(({x} * 9).long(), ({s} * 9).long()).double() | {x}.signbit() | {x}.nextafter({s}).detach() + {x} | {x}.histc(4, -2, 2)
    torch.stack({x1}.unbind({d})) | torch.dstack([{x1}, {s}]) | torch.column_stack([{x1}, {s}])
    torch.tril_indices({x1}.shape[0], 3).double() | F.gaussian_nll_loss({x}, {s}, {s}.abs() + 0.5) | F.poisson_nll_loss({x}, {s})
    F.soft_margin_loss({x}, {s}.sign()) | F.triplet_margin_loss({e2}, {s} + 1, {s} * 2) | F.hinge_embedding_loss({x}, {s}.sign())
    F.cosine_embedding_loss({e2}, {s} + 1, {e2}[:, 0].sign()) | F.margin_ranking_loss({x}, {s}, {s}.sign())
    F.multi_margin_loss({e2}, {e2}.argmax(1)) | F.multilabel_soft_margin_loss({e2}, ({s} > 0).double())
    F.interpolate({e4}, scale_factor=2, mode="bilinear") | F.interpolate({e3}, size=5, mode="linear")
    F.interpolate({e4}, scale_factor=2, mode="nearest") | F.pixel_unshuffle({e4}.repeat(1, 1, 2, 2), 2)
    F.lp_pool1d({e3}.abs() + 0.1, 2, 1) | F.pad({e4}, (1, 1, 0, 1), mode="reflect") if {e4}.shape[-1] > 1 and {e4}.shape[-2] > 1 else {e4}
    F.pad({e3}, (1, 1), mode="circular") | F.unfold({e4}, 1) | F.adaptive_max_pool1d({e3}, 1) | F.adaptive_avg_pool2d({e4}, 1)
    F.conv1d({e3}, {e3}[:1, :, :1]) | F.conv1d({e3}, {e3}[:2, :, :1], padding="same") | F.conv2d({e4}, {e4}[:2, :, :1, :1])
    F.grid_sample({e4}, {e4}[:, :1, :, :1].sigmoid().expand(-1, 2, -1, 3).permute(0, 2, 3, 1), align_corners=False)
    torch._foreach_mul([{x}, {s}], 2.0)[1] | torch._foreach_add([{x}], [{s}])[0]
    {x1}.index_reduce({d}, {i}, {x1}.index_select({d}, {i}), "mean")
    {x1}.scatter_reduce({d}, {x1}.argsort({d}), {x1}, "sum", include_self={k}) | {x1}.argsort(dim={d}, stable=True).double()
    torch.unique_consecutive({x1}).sum() | {x1}.put(torch.tensor([0]), {x1}.flatten()[:1]) | {x1}.take(torch.tensor([0, 0]))
    {x1}.unsafe_chunk(2, {d})[0] | {x1}.dsplit(1)[0] if {x1}.ndim > 2 else {x1} | {x2}.adjoint() | {x1}.nonzero().sum()
    torch.fft.ifft(torch.fft.fft({x1}, dim={d}), dim={d}).real | torch.fft.fftshift({x1}, dim={d}) | {x}.conj() | {x}.logit(eps=0.1)
    torch.func.grad(lambda t: t.sin().sum())({x}) | torch.vmap(lambda t: t * t.sum())({x1}) | {x1}.softmax({d}).log().exp()
    {x1}.sort({d}).indices.double() | ({x1} == {x1}.max({d}, keepdim=True).values) * {x1} | {x1}.pow({x1}.new_tensor([2.0]))
    {x1}.cumsum({d}).flip({d}).cumsum({d}) * 0.1 | {x}.tanh().atanh()
"""  # noqa: E501

RANDOM = """
    F.dropout({x}, 0.3) | F.dropout({x}, 0.5) | {x} + torch.rand({x}.shape, dtype=torch.float64) | {x} + torch.randn_like({x}) * 0.1
    {x} * torch.rand_like({x}) | torch.bernoulli({x}.sigmoid()) * {x} | {x} * torch.randint(0, 3, {x}.shape)
    {x1}[torch.randperm({x1}.shape[0])] | F.alpha_dropout({x}, 0.3, True) | F.dropout1d({e3}, 0.5, True)
    {x} + torch.empty_like({x}).uniform_(0, 1) | torch.normal({x}, 0.5)
    {x1} * torch.empty({x1}.shape[-1], dtype=torch.float64).normal_() | {x} + torch.empty_like({x}).exponential_()
    checkpoint(lambda t: F.dropout(t, 0.5) * t, {x}, use_reentrant=False) | F.gumbel_softmax({x1})
    {e2}.softmax(-1).multinomial(1) * {e2} | torch.rand(()) * {x} | F.dropout({x}, 0.5, inplace=False) if self.training else {x}
    {x} * (torch.rand({x}.shape) < 0.5) | F.dropout2d({e4}, 0.5)
"""  # noqa: E501

FAMILIES: dict[str, tuple[int, list[str]]] = {  # how often, and the templates
    name: (weight, [one.strip() for line in text.strip().splitlines() for one in line.split(" | ") if one.strip()])
    for name, weight, text in (
        ("unary", 5, UNARY), ("binary", 6, BINARY), ("same", 4, SAME), ("reduce", 4, REDUCE), ("norm", 2, NORM),
        ("view", 8, VIEW), ("in place", 2, INPLACE), ("mask", 1, MASKS), ("random", 1, RANDOM),
        ("algebra", 1, ALGEBRA.replace("A", SQUARE)), ("more", 4, MORE),
    )
}  # fmt: skip
