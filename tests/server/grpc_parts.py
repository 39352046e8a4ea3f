"""What the gRPC tests share: a served tiny model, and JetStream's messages as its published clients know them."""

import asyncio
import contextlib
import functools
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import jax
import jax.numpy as jnp
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from jetserve.cache.pages import PageAllocator
from jetserve.checkpoint.load import LoadedModel, load_model
from jetserve.config import CacheConfig, EngineConfig, MeshConfig, ServerConfig
from jetserve.engine.async_engine import AsyncEngine
from jetserve.engine.engine import Engine
from jetserve.engine.runner import Runner
from jetserve.engine.scheduler import Scheduler
from jetserve.parallel.mesh import make_mesh
from jetserve.server.grpc import GrpcServer
from jetserve.server.metrics import Metrics
from jetserve.server.observe import Observer
from jetserve.server.proto import jetstream_pb2 as pb
from jetserve.server.proto.jetstream_pb2_grpc import OrchestratorStub
from jetserve.testing import make_tiny_checkpoint

TIMEOUT = 120.0
MAX_LENGTH = 480
_folder = tempfile.TemporaryDirectory()


@functools.cache
def loaded() -> LoadedModel:
    folder = make_tiny_checkpoint(Path(_folder.name) / "tiny")
    return load_model(folder, mesh=make_mesh(MeshConfig(), jax.devices()[:1]), dtype=jnp.float32)


@functools.cache
def runner() -> Runner:
    config = EngineConfig(
        max_sequences=8, max_length=MAX_LENGTH, max_step_tokens=32, max_queue=200, cache=CacheConfig(page_size=8)
    )
    return Runner(loaded().model, config, make_mesh(config.mesh, jax.devices()[:1]))


def make_engine(max_queue: int | None = None, *, pages: int | None = None) -> Engine:
    tokenizer = loaded().tokenizer
    assert tokenizer is not None
    engine = Engine(runner(), tokenizer)
    if max_queue is not None:
        config = EngineConfig(max_sequences=1, max_length=MAX_LENGTH, max_queue=max_queue, cache=engine.config.cache)
        engine.config = config
        engine.scheduler = Scheduler(config, engine.allocator)
    if pages is not None:
        engine.allocator = PageAllocator(pages, engine.config.cache.page_size, engine.config.cache.prefix_caching)
        engine.scheduler = Scheduler(engine.config, engine.allocator)
    return engine


class Served:
    """A server on a port of its own, and a client of it."""

    def __init__(self, engine: AsyncEngine, server: GrpcServer, channel: grpc.aio.Channel) -> None:
        self.engine = engine
        self.server = server
        self.channel = channel
        self.stub = OrchestratorStub(channel)

    async def decode(self, request: pb.DecodeRequest, **settings: Any) -> list[pb.DecodeResponse]:
        return [response async for response in self.stub.Decode(request, **settings)]

    async def status_of(self, request: pb.DecodeRequest, **settings: Any) -> grpc.aio.AioRpcError:
        try:
            responses = await self.decode(request, **settings)
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError(f"no error, but {responses}")


@contextlib.asynccontextmanager
async def serving(
    engine: Engine, credentials: grpc.ChannelCredentials | None = None, **settings: Any
) -> AsyncIterator[Served]:
    server = GrpcServer(ServerConfig(grpc_port=0, **settings))
    front = AsyncEngine(engine)
    address = f"127.0.0.1:{server.port}"
    channel = (
        grpc.aio.insecure_channel(address)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, [("grpc.ssl_target_name_override", "localhost")])
    )
    try:
        await server.start(front, Observer(Metrics(front, model="tiny")))
        yield Served(front, server, channel)
    finally:
        await channel.close()
        await front.stop()
        await server.stop(1)


def play(
    scene: Callable[[Any], Awaitable[None]], engine: Engine | None = None, *, serve: Any = None, **settings: Any
) -> None:
    """Runs a scene against a server, of `serve` in place of this file's `serving`; afterwards no page is in use."""

    async def main() -> None:
        async with asyncio.timeout(TIMEOUT), (serve or serving)(engine or make_engine(), **settings) as served:
            await scene(served)
            await served.engine.drain(TIMEOUT)
            assert served.engine.stats().pages_used == 0

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0.002)


def text_request(text: str = "hello", max_tokens: int = 8, **fields: Any) -> pb.DecodeRequest:
    content = pb.DecodeRequest.TextContent(text=text)
    fields = {"ignore_eos": True, **fields}
    return pb.DecodeRequest(text_content=content, max_tokens=max_tokens, **fields)


def tokens_of(responses: list[pb.DecodeResponse], sample: int = 0) -> list[int]:
    return [token for response in responses for token in response.stream_content.samples[sample].token_ids]


def text_of(responses: list[pb.DecodeResponse], sample: int = 0) -> str:
    return "".join(response.stream_content.samples[sample].text for response in responses)


def jetstream_messages() -> dict[str, Any]:
    """The messages of JetStream's published protocol, without anything that this project added, by name."""
    T = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="old.proto", package="jetstream_proto", syntax="proto3")

    def add(parent: Any, name: str, *fields: tuple[str, int, int, str], repeated: tuple[str, ...] = ()) -> Any:
        message = parent.add(name=name)
        for field, number, kind, type_name in fields:
            added = message.field.add(name=field, number=number, type=kind, label=T.LABEL_OPTIONAL)
            if field in repeated:
                added.label = T.LABEL_REPEATED
            if type_name:
                added.type_name = f".jetstream_proto.{type_name}"
        return message

    request = add(
        file.message_type,
        "DecodeRequest",
        ("max_tokens", 4, T.TYPE_INT32, ""),
        ("text_content", 5, T.TYPE_MESSAGE, "DecodeRequest.TextContent"),
        ("token_content", 6, T.TYPE_MESSAGE, "DecodeRequest.TokenContent"),
        ("metadata", 7, T.TYPE_MESSAGE, "DecodeRequest.Metadata"),
        ("num_samples", 8, T.TYPE_INT32, ""),
        ("has_bos", 10, T.TYPE_BOOL, ""),
    )
    request.oneof_decl.add(name="content")
    for field in request.field:
        if field.name.endswith("_content"):
            field.oneof_index = 0
    add(request.nested_type, "TextContent", ("text", 1, T.TYPE_STRING, ""))
    add(request.nested_type, "TokenContent", ("token_ids", 1, T.TYPE_INT32, ""), repeated=("token_ids",))
    add(request.nested_type, "Metadata", ("start_time", 1, T.TYPE_FLOAT, ""))
    response = add(
        file.message_type,
        "DecodeResponse",
        ("stream_content", 3, T.TYPE_MESSAGE, "DecodeResponse.StreamContent"),
    )
    stream = add(
        response.nested_type,
        "StreamContent",
        ("samples", 1, T.TYPE_MESSAGE, "DecodeResponse.StreamContent.Sample"),
        repeated=("samples",),
    )
    fields = ("text", 1, T.TYPE_STRING, ""), ("token_ids", 2, T.TYPE_INT32, "")
    add(stream.nested_type, "Sample", *fields, repeated=("token_ids",))
    add(file.message_type, "HealthCheckRequest")
    add(file.message_type, "HealthCheckResponse", ("is_live", 1, T.TYPE_BOOL, ""))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = ("DecodeRequest", "DecodeResponse", "HealthCheckRequest", "HealthCheckResponse")
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"jetstream_proto.{name}")) for name in names
    }
