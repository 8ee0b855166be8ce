"""Messages of the exchange among workers to values and back.  [shell]"""

from ayni.errors import BadRequest, TooLarge
from ayni.messages import bucket_message, bucket_of, dtype_enum, dtype_name, stats_message, stats_of
from ayni.tensors import WIRE_DTYPES, TensorSpec, scale_block_elements
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import peer_pb2, tensor_pb2
from worker_agent.contributions import Offer
from worker_agent.slice_offers import Moment, SliceOffer

_MOST_MICROBATCHES = 1 << 16
_MOST_COMPONENTS = 1 << 16


def slice_offer(worker_id: int, offer: Offer, spec: TensorSpec, moment: Moment, bounds: tuple[int, int]) -> SliceOffer:
    """Returns what a worker says of one slice of what it brings to a bucket, except whether it takes the mean."""
    return SliceOffer(
        worker_id=worker_id,
        lease_id=offer.assignment.lease_id,
        moment=moment,
        bucket=offer.bucket,
        spec=spec,
        start=bounds[0],
        stop=bounds[1],
        takes_mean=False,
        stats=tuple(offer.microbatches),
    )


def begin_frame(offer: SliceOffer) -> bytes:
    """Returns the encoded first frame of a contribution to a slice."""
    round_ = pb.RoundBegin(
        worker_id=offer.worker_id,
        epoch=offer.moment.epoch,
        step=offer.moment.step,
        attempt=offer.moment.attempt,
        lease_id=offer.lease_id,
        tensor=tensor_pb2.TensorSpec(
            dtype=dtype_enum(offer.spec.dtype),
            num_elements=offer.spec.num_elements,
            component_sizes=offer.spec.component_sizes,
            scale_block_elements=scale_block_elements(offer.spec.dtype),
        ),
        microbatches=[stats_message(stats) for stats in offer.stats],
    )
    begin = peer_pb2.SliceBegin(
        round=round_,
        generation=offer.moment.generation,
        bucket=bucket_message(offer.bucket),
        first_element=offer.start,
        num_elements=offer.stop - offer.start,
        takes_mean=offer.takes_mean,
    )
    return peer_pb2.ReduceSliceRequest(begin=begin).SerializeToString()


def slice_offer_of(begin: peer_pb2.SliceBegin) -> SliceOffer:
    """Returns what a worker says when it begins to contribute to a slice.

    Raises:
        BadRequest: a field is missing or impossible.
        TooLarge: a list is too long.
    """
    opening = begin.round
    _limit("microbatches", len(opening.microbatches), _MOST_MICROBATCHES)
    _limit("component_sizes", len(opening.tensor.component_sizes), _MOST_COMPONENTS)
    return SliceOffer(
        worker_id=opening.worker_id,
        lease_id=opening.lease_id,
        moment=Moment(generation=begin.generation, epoch=opening.epoch, step=opening.step, attempt=opening.attempt),
        bucket=bucket_of(begin.bucket),
        spec=_spec(opening.tensor),
        start=begin.first_element,
        stop=begin.first_element + begin.num_elements,
        takes_mean=begin.takes_mean,
        stats=tuple(stats_of(message) for message in opening.microbatches),
    )


def _spec(message: tensor_pb2.TensorSpec) -> TensorSpec:
    name = dtype_name(message.dtype)
    if name not in WIRE_DTYPES or message.scale_block_elements != scale_block_elements(name):
        said = f"{name or message.dtype} with {message.scale_block_elements} elements to a scale"
        raise BadRequest(f"a slice of a tensor of {said} can't be reduced", field="tensor")
    sizes = tuple(message.component_sizes)
    if sizes and sum(sizes) != message.num_elements:
        raise BadRequest(f"components of {sum(sizes)} elements in a tensor of {message.num_elements}", field="tensor")
    return TensorSpec(dtype=name, num_elements=message.num_elements, component_sizes=sizes)


def _limit(field: str, received: int, limit: int) -> None:
    if received > limit:
        sentence = f"{field} is {received} long; at most {limit} is taken"
        raise TooLarge(sentence, field=field, limit=limit, received=received)
