"""Models of plain torch, as people write them: each returns a loss."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Translator(nn.Module):
    """``nn.Transformer``, with causal and padding masks."""

    def __init__(self, layers: int = 1, width: int = 16, vocabulary: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=0)
        self.transformer = nn.Transformer(width, 4, layers, layers, 24, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        size = target.shape[1] - 1
        later = torch.ones(size, size, dtype=torch.bool).triu(1)
        padding = source == 0
        out = self.transformer(
            self.embed(source),
            self.embed(target[:, :-1]),
            tgt_mask=later,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return F.cross_entropy(self.head(out).transpose(1, 2), target[:, 1:], ignore_index=0)


class Recurrent(nn.Module):
    """A language model of LSTM or GRU layers, in both directions or one."""

    def __init__(
        self, kind: str = "LSTM", layers: int = 1, both: bool = False, width: int = 16, vocabulary: int = 24
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.rnn = getattr(nn, kind)(width, width, layers, batch_first=True, bidirectional=both)
        self.head = nn.Linear(width * (1 + both), vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out, _ = self.rnn(self.embed(ids))
        return F.cross_entropy(self.head(out[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class UNet(nn.Module):
    """Down and up again with skip connections, for a class of each pixel."""

    def __init__(self, width: int = 4, classes: int = 3) -> None:
        super().__init__()

        def block(before: int, after: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

        self.first, self.second, self.third = block(3, width), block(width, 2 * width), block(2 * width, width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        skip = self.first(image)
        x = self.up(self.second(F.max_pool2d(skip, 2)))
        return F.cross_entropy(self.head(self.third(torch.cat([skip, x], 1))), labels)


class Denoiser(nn.Module):
    """A block of a diffusion model's U-Net: group norms, an embedding of the time step, attention over the pixels."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(2, width) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.time = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, 2 * width))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.width = width

    def forward(self, noisy: torch.Tensor, step: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        frequencies = torch.exp(-torch.arange(self.width // 2, device=step.device) / self.width).to(noisy.dtype)
        angles = step[:, None].to(noisy.dtype) * frequencies
        scale, shift = self.time(torch.cat([angles.sin(), angles.cos()], -1))[..., None, None].chunk(2, 1)
        x = self.inlet(noisy)
        h = self.convs[0](F.silu(self.norms[0](x)))
        x = x + self.convs[1](F.silu(self.norms[1](h) * (1 + scale) + shift))
        pixels = self.norms[2](x).flatten(2).transpose(1, 2)
        x = x + self.attention(pixels, pixels, pixels, need_weights=False)[0].transpose(1, 2).reshape(x.shape)
        x = F.interpolate(F.avg_pool2d(x, 2), scale_factor=2, mode="nearest")
        return F.mse_loss(self.outlet(x), noise)


class Generative(nn.Module):
    """DCGAN: a generator and a discriminator; the loss of both."""

    def __init__(self, width: int = 4, latent: int = 6) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(latent, 2 * width, 4, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(True),
            nn.ConvTranspose2d(2 * width, 3, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width, 1, 4, bias=False),
        )

    def forward(self, latent: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        fake = self.generator(latent[..., None, None])
        ours, theirs = self.discriminator(fake).flatten(), self.discriminator(real).flatten()
        of_fakes = F.binary_cross_entropy_with_logits(ours, torch.zeros_like(ours))
        return of_fakes + F.binary_cross_entropy_with_logits(theirs, torch.ones_like(theirs))


class Mixer(nn.Module):
    """MLP-Mixer: over patches, then over channels."""

    def __init__(self, layers: int = 1, width: int = 16, patches: int = 16, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.over_patches = nn.ModuleList(
            nn.Sequential(nn.Linear(patches, 24), nn.GELU(), nn.Linear(24, patches)) for _ in range(layers)
        )
        self.over_channels = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)) for _ in range(layers)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(image).flatten(2).transpose(1, 2)
        for k, (patches, channels) in enumerate(zip(self.over_patches, self.over_channels, strict=True)):
            x = x + patches(self.norms[2 * k](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * k + 1](x))
        return F.cross_entropy(self.head(self.norms[-1](x).mean(1)), labels)


class Clicks(nn.Module):
    """DLRM: bags of categories and dense features, their dot products, a click or none."""

    def __init__(self, width: int = 8, tables: int = 3, rows: int = 10) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: torch.Tensor, categories: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, *(bag(categories[:, k]) for k, bag in enumerate(self.bags))], 1)
        products = vectors @ vectors.transpose(1, 2)
        row, column = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1)
        return F.binary_cross_entropy_with_logits(
            self.top(torch.cat([x, products[:, row, column]], 1)).squeeze(1), clicked
        )


class GraphConvolution(nn.Module):
    """Two layers of a GCN: messages along edges, summed at their ends with ``index_add``."""

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, width), nn.Linear(width, classes)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        source, end = edges
        degree = torch.ones(nodes.shape[0], dtype=nodes.dtype).index_add(
            0, end, torch.ones(end.shape[0], dtype=nodes.dtype)
        )
        weight = (degree[source] * degree[end]).rsqrt()[:, None]

        def spread(x: torch.Tensor) -> torch.Tensor:
            return x / degree[:, None] + torch.zeros_like(x).index_add(0, end, x[source] * weight)

        return F.cross_entropy(spread(self.second(F.relu(spread(self.first(nodes))))), labels)


class Autoencoder(nn.Module):
    """A variational one; the noise is an argument."""

    def __init__(self, size: int = 12, latent: int = 4) -> None:
        super().__init__()
        self.encode, self.decode = (
            nn.Linear(size, 16),
            nn.Sequential(nn.Linear(latent, 16), nn.ReLU(), nn.Linear(16, size)),
        )
        self.mean, self.log_variance = nn.Linear(16, latent), nn.Linear(16, latent)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.encode(x))
        mean, log_variance = self.mean(h), self.log_variance(h)
        z = mean + noise * torch.exp(0.5 * log_variance)
        rebuilt = F.binary_cross_entropy_with_logits(self.decode(z), x.sigmoid(), reduction="sum")
        return rebuilt - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
