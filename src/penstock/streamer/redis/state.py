"""QueueState: what waits and runs in the queue of a model. For scalers, dashboards and `penstock queue`."""

from msgspec import Struct

from penstock.streamer.redis.address import BrokerAddress
from penstock.streamer.redis.connection import RedisConnection
from penstock.streamer.redis.protocol import GROUP, RELEASED, QueueKeys, Script

STATE = Script("""
-- queue, dead letters | group, the consumer of released entries. Returns {entries, entries in the hands of workers,
-- milliseconds for which the oldest other entry has waited, workers, dead letters}.
local entries, dead = redis.call('XLEN', KEYS[1]), redis.call('XLEN', KEYS[2])
local running, workers, last, oldest = 0, 0, '-', nil
local function older(id)
  local ms = tonumber(string.match(id, '%d+'))
  if not oldest or ms < oldest then oldest = ms end
end
if redis.call('EXISTS', KEYS[1]) == 1 then
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    local g = {}
    for i = 1, #group, 2 do g[group[i]] = group[i + 1] end
    if g.name == ARGV[1] then
      last = '(' .. g['last-delivered-id']
      for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
        local c = {}
        for i = 1, #consumer, 2 do c[consumer[i]] = consumer[i + 1] end
        if c.name ~= ARGV[2] then
          workers, running = workers + 1, running + c.pending
        elseif c.pending > 0 then
          older(redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2])[1][1])
        end
      end
    end
  end
  local first = redis.call('XRANGE', KEYS[1], last, '+', 'COUNT', 1)[1]
  if first then older(first[1]) end
end
local now = redis.call('TIME')
local waited = oldest and now[1] * 1000 + math.floor(now[2] / 1000) - oldest or 0
return {entries, math.min(running, entries), math.max(waited, 0), workers, dead}
""")


class QueueState(Struct, frozen=True):
    """`waiting` requests are in no worker's hands, the oldest of them for `wait_s` seconds; workers have taken the
    `running` ones. `workers` includes a dead one until others have removed it, after a minute."""

    prefix: str
    waiting: int
    running: int
    wait_s: float
    workers: int
    dead_letters: int


class QueueReader:
    """Reads the state of one queue, over its own connection."""

    def __init__(self, address: BrokerAddress, prefix: str) -> None:
        self.prefix = prefix
        self._keys = QueueKeys(prefix)
        self._connection = RedisConnection(address, self._keys.queue)

    async def read(self) -> QueueState:
        """The state now; all zeros if there is no queue. Raises what `RedisConnection.ask` raises."""
        keys = (self._keys.queue, self._keys.dead)
        entries, running, waited_ms, workers, dead = await self._connection.run(STATE, keys, (GROUP, RELEASED))
        waiting = entries - running
        return QueueState(self.prefix, waiting, running, waited_ms / 1000 if waiting else 0.0, workers, dead)

    async def close(self) -> None:
        await self._connection.close()
