"""Projections with experts; a projection without experts is one product already."""

from typing import Any

from torch import Tensor

from braidlm.kernels.context import PassContext, PendingAdd, add_pending, combined
from braidlm.kernels.lowerings.banks import grouped_feed, grouped_linear
from braidlm.kernels.lowerings.lowering import LayerLowering, Lowering, SharedSums, lowers
from braidlm.kernels.lowerings.router import EXPERTS, ROUTER, has_few_choices, route, router_refusal, router_sums
from braidlm.kernels.ops.dropout import NO_DROPOUT, DropoutUse
from braidlm.model.paths.project import ExpertProjection, ProjectStage
from braidlm.model.routing.routing import Routings


@lowers(ExpertProjection)
class ExpertProjectionLowering(Lowering):
    """The bank inside a projection; a gated one is Swish-gated and has no dropout."""

    honours = {"names", "kind", "hidden"} | {f"router.{option}" for option in ROUTER}
    gated = True

    def first_linear(self, feed: ExpertProjection) -> Any:
        return feed.gate_up

    def activation(self, feed: ExpertProjection) -> str:
        return "silu"

    def inner_dropout(self, feed: ExpertProjection, context: PassContext) -> DropoutUse:
        return NO_DROPOUT


@lowers(ProjectStage)
class ProjectionLowering(LayerLowering):
    honours = EXPERTS | {"to", "bias", "experts.kind", "experts.hidden"}

    def reject(self, part: ProjectStage, body: Any) -> str | None:
        if part.experts is None:
            return "a projection without experts is one product already"
        return router_refusal(part.experts.router, body)

    def reads(self, part: Any) -> list[Tensor | None]:
        return [linear.weight for linear in (part.experts.gate_up, part.experts.out) if linear is not None]

    def sums(self, part: Any, norm: Any) -> list[SharedSums]:
        router = part.experts.router
        return [router_sums(router, has_few_choices(router), ProjectStage)]

    def run(
        self, stream: Any, pending: PendingAdd | None, layer: Any, context: PassContext
    ) -> tuple[Tensor, None, Routings]:
        stream, experts = combined(stream), layer.experts
        slot = None if pending is None or pending.dropout else pending.slot  # with dropout the gradients differ
        dispatch, stream = route(experts.router, add_pending(stream, pending), context, slot)
        if experts.gate_up is None:
            rows = grouped_linear(experts.out, stream, dispatch, context, gather=True)
        else:
            rows = grouped_feed(experts, stream, dispatch, context)
        return dispatch.combine(rows), None, (dispatch.routing,)
