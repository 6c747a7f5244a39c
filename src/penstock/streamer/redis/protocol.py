"""The data that callers and workers exchange through a broker: its keys, its messages, and the scripts that change it.

An entry of the queue has the fields `h` (a RequestHeader) and `p` (the value, see `codec.py`). An entry of a client's
replies has one field, `a` (BrokerReplies): one message for all results of one batch to one client. Pure.
"""

import hashlib
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from penstock.core.wire.objects import RemoteException
from penstock.errors import PenstockError, describe, from_code, plain
from penstock.streamer.redis.codec import MalformedMessage

VERSION = 1
MAX_BUDGET_MS = 7 * 24 * 3600 * 1000

GROUP = "workers"  # the only consumer group of a queue
RELEASED = "released"  # the consumer that receives entries from a worker that ends; no process reads as this consumer

# ---- keys


class QueueKeys(Struct, frozen=True):
    """The keys of one model. `prefix` separates models on one broker. The braces put all keys of a model on one node
    of a cluster."""

    prefix: str = ""

    @property
    def queue(self) -> str:
        """The stream of waiting and running requests."""
        return self._name("queue")

    @property
    def dead(self) -> str:
        """The stream of dead letters: malformed requests, and requests that were running in two worker deaths."""
        return self._name("dead")

    def replies(self, client: str) -> str:
        """The stream of replies to one client."""
        return self._name(f"replies:{client}")

    def sent(self, client: str) -> str:
        """The last submission of one client: its number, and the ids that its entries received."""
        return self._name(f"sent:{client}")

    def _name(self, what: str) -> str:
        return f"{{penstock:{self.prefix}}}:{what}"


# ---- messages

ClientId = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Number = Annotated[int, Meta(ge=0)]


class RequestHeader(Struct, array_like=True, frozen=True):
    """The sender of a request, and how long it waits: `budget_ms` from the time when the broker assigned the id.

    With `due`, the caller set a deadline, which may decide the order of requests; otherwise `budget_ms` is only the
    longest wait, and requests run in order of arrival. `traceparent`: of the caller's span, if it is traced.
    """

    version: int
    client: ClientId
    number: Number
    budget_ms: Annotated[int, Meta(ge=0, le=MAX_BUDGET_MS)]
    priority: Annotated[int, Meta(ge=0, le=255)] = 0
    due: bool = False
    traceparent: str = ""


class WireError(Struct, array_like=True, frozen=True):
    """An error without its detail, which stays in the process that raised it. `original` names the model's exception:
    callers use it only if they have imported its module."""

    code: str
    message: str
    retry_after_s: float | None = None
    original: RemoteException | None = None


class BrokerReply(Struct, array_like=True, frozen=True):
    """The result of one request of a client: an encoded value, or an error."""

    number: Number
    body: bytes = b""
    error: WireError | None = None


class BrokerReplies(Struct, array_like=True, frozen=True):
    """The replies of one batch to one client."""

    version: int
    replies: list[BrokerReply]


T = TypeVar("T", RequestHeader, BrokerReplies)

dump = msgspec.msgpack.Encoder().encode
_header_decoder = msgspec.msgpack.Decoder(RequestHeader)
_replies_decoder = msgspec.msgpack.Decoder(BrokerReplies)


def load_header(data: bytes) -> RequestHeader:
    """Raises MalformedMessage."""
    return _load(_header_decoder, data, "header of the message")


def parse_entry(fields: list[bytes]) -> tuple[RequestHeader, bytes]:
    """The header and the payload of an entry. Raises MalformedMessage."""
    named = dict(zip(fields[::2], fields[1::2], strict=True))
    if named.keys() != {b"h", b"p"} or len(fields) != 4:
        raise MalformedMessage("the message has other fields than a header and a payload")
    return load_header(named[b"h"]), named[b"p"]


def header_or_none(fields: list[bytes]) -> RequestHeader | None:
    """The header of an entry that may be malformed otherwise; None if it cannot be read."""
    try:
        return load_header(dict(zip(fields[::2], fields[1::2], strict=True))[b"h"])
    except (MalformedMessage, KeyError):
        return None


def load_replies(data: bytes) -> list[BrokerReply]:
    """Raises MalformedMessage."""
    return _load(_replies_decoder, data, "reply").replies


def _load(decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T:
    try:
        message = decoder.decode(data)
    except Exception as e:
        raise MalformedMessage(f"the {what} cannot be read: {describe(e)}") from None
    if message.version != VERSION:
        found = f"the {what} has version {message.version}, expected {VERSION}"
        raise MalformedMessage(f"{found}: callers and workers differ")
    return message


def to_wire(error: PenstockError) -> WireError:
    """An error in the form that is sent."""
    original = None if error.original is None else error.original.plain()
    return WireError(error.code, plain(error.message), error.retry_after_s, original)


def from_wire(wire: WireError) -> PenstockError:
    """The error that was sent."""
    error = from_code(wire.code, wire.message)
    error.retry_after_s, error.original = wire.retry_after_s, wire.original
    return error


# ---- scripts, for Redis 6.2 and newer


class Script:
    """A Lua program that runs atomically in the broker, and the digest that names it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


SUBMIT = Script("""
-- queue, sent | submission, seconds, most entries, then for each call: number of entries, and header and payload of
-- each. Returns {queue length before, milliseconds for which the oldest entry has been in the queue if it is full, 1 if
-- the broker knew the client, for each call: its ids, or the number of entries refused, ...}. A repeated submission,
-- whose reply was lost, returns its first result.
local last = redis.call('GET', KEYS[2])
if last then
  local sent = cjson.decode(last)
  if sent[1] == ARGV[1] then return sent[2] end
end
local length = redis.call('XLEN', KEYS[1])
local free = tonumber(ARGV[3]) - length
local result = {length, 0, last and 1 or 0}
local i = 4
while i <= #ARGV do
  local n = tonumber(ARGV[i])
  if n > free then
    result[#result + 1] = n
    local oldest, now = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1], redis.call('TIME')
    if oldest then result[2] = now[1] * 1000 + math.floor(now[2] / 1000) - string.match(oldest[1], '%d+') end
  else
    local ids = {}
    for j = 1, n do
      ids[j] = redis.call('XADD', KEYS[1], '*', 'h', ARGV[i + 2 * j - 1], 'p', ARGV[i + 2 * j])
    end
    free = free - n
    result[#result + 1] = ids
  end
  i = i + 1 + 2 * n
end
redis.call('SET', KEYS[2], cjson.encode({ARGV[1], result}), 'EX', ARGV[2])
return result
""")

MISSING = Script("""
-- queue | ids. Returns the ids that the queue no longer holds.
local missing = {}
for _, id in ipairs(ARGV) do
  if #redis.call('XRANGE', KEYS[1], id, id) == 0 then missing[#missing + 1] = id end
end
return missing
""")

# other data under one of the keys must not keep the rest from being written
TRY = """
local wrong, failed = 0, nil
local function try(...)
  local reply = redis.pcall(...)
  if type(reply) ~= 'table' or not reply.err then return true end
  if string.find(reply.err, 'WRONGTYPE', 1, true) then wrong = wrong + 1 else failed = failed or reply end
end
"""

ANSWER = Script(
    TRY
    + """
-- queue, replies of each client | group, seconds, number of ids, ids, a message for each client. Returns the number of
-- refused commands. Answered entries leave the queue first: a broker without memory can then still store the replies.
local ids, n = {}, tonumber(ARGV[3])
for i = 1, n do ids[i] = ARGV[3 + i] end
if n > 0 then
  try('XACK', KEYS[1], ARGV[1], unpack(ids))
  try('XDEL', KEYS[1], unpack(ids))
end
for i = 2, #KEYS do
  if try('XADD', KEYS[i], '*', 'a', ARGV[2 + n + i]) then try('EXPIRE', KEYS[i], ARGV[2]) end
end
return failed or wrong
"""
)

BURY = Script(
    TRY
    + """
-- queue, dead letters | group, id, reason, most letters, then the fields of the entry. Returns the number of refused
-- commands.
try('XACK', KEYS[1], ARGV[1], ARGV[2])
try('XDEL', KEYS[1], ARGV[2])
try('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'id', ARGV[2], 'why', ARGV[3], unpack(ARGV, 5))
return failed or wrong
"""
)

INHERIT = Script("""
-- queue | group, this worker, idle milliseconds, limit. Takes over entries of workers that do not renew their leases.
-- Returns {id, fields, number of earlier deliveries} of each.
local found = redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[3], '-', '+', ARGV[4])
local mine = {}
for _, p in ipairs(found) do
  if p[2] ~= ARGV[2] then
    local got = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], p[1])
    if got[1] then
      mine[#mine + 1] = {p[1], got[1][2], p[4]}
    else
      redis.call('XACK', KEYS[1], ARGV[1], p[1])  -- its caller removed it from the queue
    end
  end
end
return mine
""")

LEAVE = Script("""
-- queue | group, this worker ('' for none), idle milliseconds. Removes this worker, and idle workers without entries.
local left = 0
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local c = {}
  for i = 1, #consumer, 2 do c[consumer[i]] = consumer[i + 1] end
  if c.pending == 0 and (c.name == ARGV[2] or c.idle > tonumber(ARGV[3])) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], c.name)
  else
    left = left + 1
  end
end
if left == 0 and redis.call('XLEN', KEYS[1]) == 0 then redis.call('DEL', KEYS[1]) end
return left
""")
