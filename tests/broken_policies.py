"""Policies that are wrong, each in a way of its own, beside one that is right."""

from typing import ClassVar, Literal

import attrs
import mlx.core as mx

from velox_core import Policy, Rows, hookimpl

policy = attrs.frozen(eq=False, kw_only=True)


@policy
class Right(Policy):
    """The newest query's attention; what the others spoil."""

    hook_version: ClassVar[int] = 1
    n_queries: ClassVar[int] = 1

    @hookimpl
    def score(self, rows: Rows):
        return rows.pool(rows.attention(last=1)).squeeze(2)


# Scores


@policy
class NoReturn(Right):
    @hookimpl
    def score(self, rows):
        rows.pool(rows.attention(last=1)).squeeze(2)


@policy
class WrongShape(Right):
    @hookimpl
    def score(self, rows):
        return rows.pool(rows.attention(last=1))


@policy
class OneScope(Right):
    """Gives one choice a layer even where each head should choose."""

    @hookimpl
    def score(self, rows):
        return rows.attention(last=1).mean(axis=(1, 2))[:, None]


@policy
class OneSequence(Right):
    @hookimpl
    def score(self, rows):
        return rows.pool(rows.attention(last=1)).squeeze(2).reshape(1, -1, rows.keys.shape[2])


@policy
class InfiniteScores(Right):
    """Protects by score."""

    @hookimpl
    def score(self, rows):
        weights = rows.pool(rows.attention(last=1)).squeeze(2)
        return mx.where(rows.positions > rows.newest - 4, mx.inf, weights)


@policy
class KeysType(Right):
    @hookimpl
    def score(self, rows):
        return rows.pool(rows.attention(last=1)).squeeze(2).astype(rows.keys.dtype)


@policy
class DividesByZero(Right):
    n_queries: ClassVar[int] = 0

    @hookimpl
    def score(self, rows):
        norms = mx.abs(rows.keys.astype(mx.float32)).sum(axis=-1)
        norms = norms if rows.scope == "head" else norms.mean(axis=1, keepdims=True)
        spread = mx.abs(norms - norms.mean(axis=-1, keepdims=True)).mean(axis=-1, keepdims=True)
        return (norms - norms.mean(axis=-1, keepdims=True)) / spread


@policy
class Overflows(Right):
    n_queries: ClassVar[int] = 0
    scope: Literal["layer", "head"] = "head"

    @hookimpl
    def score(self, rows):
        norms = (rows.keys * rows.keys).sum(axis=-1).astype(mx.float32)
        return norms if rows.scope == "head" else norms.mean(axis=1, keepdims=True)


# Choices


@policy
class IgnoresProtection(Right):
    @hookimpl
    def evict(self, rows, scores, protected, count):
        return mx.argsort(scores, axis=-1)[..., :count]


@policy
class KeepsEmptyRows(Right):
    @hookimpl
    def evict(self, rows, scores, protected, count):
        scores = mx.where(protected | (rows.positions < 0), 2.0, scores)
        return mx.argsort(scores, axis=-1)[..., :count]


@policy
class OneRowTwice(Right):
    @hookimpl
    def evict(self, rows, scores, protected, count):
        lowest = mx.argmin(mx.where(protected, mx.inf, scores), axis=-1, keepdims=True)
        return mx.broadcast_to(lowest, (*lowest.shape[:2], count))


@policy
class BeyondTheRows(Right):
    @hookimpl
    def evict(self, rows, scores, protected, count):
        scores = mx.where(protected, mx.inf, scores)
        return mx.argsort(scores, axis=-1)[..., :count] + rows.positions.shape[-1]


@policy
class ForgetsNaN(Right):
    """As the core's own choice, but for NaN, which MLX sorts behind the infinite."""

    @hookimpl
    def evict(self, rows, scores, protected, count):
        return mx.argsort(mx.where(protected, mx.inf, scores), axis=-1)[..., :count]


# Protection and budget


@policy
class ForgetsSinks(Right):
    @hookimpl
    def protect(self, rows):
        return rows.positions > rows.newest - 2


@policy
class ProtectsNothing(Right):
    """Forgets its `return`."""

    @hookimpl
    def protect(self, rows):
        rows.positions < self.n_sink  # noqa: B015


@policy
class ProtectsInts(Right):
    @hookimpl
    def protect(self, rows):
        return rows.positions * 0


@policy
class EvictsNothing(Right):
    @hookimpl
    def evict(self, rows, scores, protected, count):
        return mx.argsort(scores, axis=-1)


@policy
class ClaimsInSecret(Right):
    """Protects more rows than it says."""

    @hookimpl
    def protect(self, rows):
        return (rows.positions > rows.newest - 6) | (rows.positions < self.n_sink)


@policy
class ClaimsAll(Right):
    @hookimpl
    def protect(self, rows):
        return rows.positions >= 0


@policy
class TwiceTheBudget(Right):
    def layer_budget(self, layer, n_layers):
        return 2 * self.budget


@policy
class HalfTheBudget(Right):
    def layer_budget(self, layer, n_layers):
        return self.budget // 2 + 2


# State


@policy
class ChangesKeys(Right):
    @hookimpl
    def score(self, rows):
        keys = rows.keys
        keys *= 0.5
        return rows.pool(rows.attention(last=1)).squeeze(2)


@policy
class Remembers(Right):
    memory: dict = attrs.field(factory=dict, init=False)

    @hookimpl
    def score(self, rows):
        weights = rows.pool(rows.attention(last=1)).squeeze(2)
        last = self.memory.get("last")
        self.memory["last"] = weights
        return weights if last is None or last.shape != weights.shape else weights - last


@policy
class Random(Right):
    @hookimpl
    def score(self, rows):
        return mx.random.uniform(shape=rows.positions.shape)


@policy
class CopiesLoseOptions(Right):
    def __deepcopy__(self, memo):
        return type(self)(n_sink=0)


@policy
class OptionsDrift(Right):
    n_sink: int = attrs.field(default=4, converter=lambda n: n + 1)


@policy
class NoJSON(Right):
    kind: object = mx.float32


# Layers


@policy
class NaNInLateLayers(Right):
    @hookimpl
    def score(self, rows):
        weights = rows.pool(rows.attention(last=1)).squeeze(2)
        return weights if rows.layer < 2 else mx.sqrt(weights - 1)


@policy
class WrongShapeInLateLayers(Right):
    @hookimpl
    def score(self, rows):
        weights = rows.pool(rows.attention(last=1))
        return weights.squeeze(2) if rows.layer < 2 else weights


@policy
class ForgetsSinksInLateLayers(Right):
    @hookimpl
    def protect(self, rows):
        return rows.positions < (self.n_sink if rows.layer < 2 else 0)


@policy
class SharesAcrossLayers(Right):
    """Late layers choose by what the first one saw last."""

    memory: dict = attrs.field(factory=dict, init=False)

    @hookimpl
    def score(self, rows):
        weights = rows.pool(rows.attention(last=1)).squeeze(2)
        if rows.layer == 0:
            self.memory["first"] = weights
        first = self.memory.get("first")
        return weights if first is None or first.shape != weights.shape else first


@policy
class StarvesLateLayers(Right):
    def layer_budget(self, layer, n_layers):
        return self.budget - layer


@policy
class FeedsFirstLayers(Right):
    def layer_budget(self, layer, n_layers):
        return self.budget if n_layers - layer < 2 else 2 * self.budget


# Blocks, batches


@policy
class LastQueryOnly(Right):
    """H2O, had it forgotten all but the last query of each block."""

    every_step: ClassVar[bool] = True

    @hookimpl
    def score(self, rows):
        return rows.scores + rows.pool(rows.attention(last=1)).squeeze(2)


@policy
class DecaysEachCall(Right):
    """Forgets with each block, whether of one token or of many."""

    every_step: ClassVar[bool] = True

    @hookimpl
    def score(self, rows):
        return 0.5 * rows.scores + rows.pool(rows.received(rows.n_new))


@policy
class DecaysSlowly(Right):
    """Likewise, and so little a block that it takes many to show."""

    every_step: ClassVar[bool] = True

    @hookimpl
    def score(self, rows):
        return 0.95 * rows.scores + rows.pool(rows.received(rows.n_new))


@policy
class CountsQueriesAgain(Right):
    """As H2O, but sees older queries too: in a padded batch some of them are counted twice."""

    n_queries: ClassVar[int] = 8
    every_step: ClassVar[bool] = True

    @hookimpl
    def score(self, rows):
        return rows.scores + rows.pool(rows.received(rows.n_new))


@policy
class Parts(Right):
    """Not broken: how much a row gets of the queries that look at it most."""

    every_step: ClassVar[bool] = True
    score_parts: ClassVar[int] = 2

    @hookimpl
    def score(self, rows):
        weights = rows.attention(last=rows.n_new)
        sums = [rows.pool(each.sum(axis=2)) for each in (weights, weights**2)]
        return rows.scores + mx.stack(sums, axis=-1)

    def fuse(self, parts):
        return parts[..., 1] / mx.maximum(parts[..., 0], 1e-9)


@policy
class FusesToNaN(Parts):
    def fuse(self, parts):
        return parts.sum(axis=-1) * mx.nan


@policy
class FuseWaits(Parts):
    def fuse(self, parts):
        return parts.sum(axis=-1) * (2 if parts.max().item() > 0 else 1)


@policy
class MixesSequences(Right):
    @hookimpl
    def score(self, rows):
        weights = rows.pool(rows.attention(last=1)).squeeze(2)
        return mx.broadcast_to(weights.mean(axis=0, keepdims=True), weights.shape)


# Time


@policy
class Waits(Right):
    @hookimpl
    def score(self, rows):
        weights = rows.pool(rows.attention(last=1)).squeeze(2)
        return weights if weights.max().item() < 2 else weights * 0


@policy
class IfOfAnArray(Right):
    @hookimpl
    def evict(self, rows, scores, protected, count):
        if (rows.newest < 2**20).all():
            return mx.argsort(
                mx.where(protected, mx.inf, mx.where(mx.isnan(scores), -mx.inf, scores)), axis=-1
            )[..., :count]
        return mx.argsort(scores, axis=-1)[..., :count]


@policy
class Slow(Right):
    @hookimpl
    def score(self, rows):
        weights = rows.pool(rows.attention(last=1)).squeeze(2)
        parts = [weights[..., i : i + 1] for i in range(weights.shape[-1])]
        for _ in range(20):
            parts = [mx.sqrt(part * part) for part in parts]
        return mx.concatenate(parts, axis=-1)


@policy
class OtherwiseReplayed(Right):
    """Waits for a number where it can, and does another thing where that fails."""

    pure: ClassVar[bool] = True

    @hookimpl
    def score(self, rows):
        weights = rows.pool(rows.attention(last=1)).squeeze(2)
        try:
            rows.newest.max().item()
        except ValueError:
            return -weights
        return weights


@policy
class OtherwiseTogether(Right):
    """Looks at the layer, and does without where all are asked at once."""

    pure: ClassVar[bool] = True

    @hookimpl
    def score(self, rows):
        weights = rows.pool(rows.attention(last=1)).squeeze(2)
        try:
            return -weights if rows.layer % 2 else weights
        except TypeError:
            return weights
