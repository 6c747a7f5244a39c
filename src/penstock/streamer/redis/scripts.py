"""What is done in the broker in one step: each script runs whole, or not at all. For Redis 6.2 and newer."""

from __future__ import annotations

import hashlib


class Script:
    """A Lua program and the digest that it is called by."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


SUBMIT = Script("""
-- queue, sent | parcel, seconds, most entries, then for each call: how many entries, and head and payload of each.
-- Gives {entries there were, {ids of a call, or how many it wanted}, ...}. A parcel that was sent before, whose answer
-- was lost on the way, gives what it gave then.
local last = redis.call('GET', KEYS[2])
if last then
  local told = cjson.decode(last)
  if told[1] == ARGV[1] then return told[2] end
end
local length = redis.call('XLEN', KEYS[1])
local room, most = tonumber(ARGV[3]) - length, tonumber(ARGV[3])
local told = {length}
local i = 4
while i <= #ARGV do
  local n = tonumber(ARGV[i])
  if n > room then
    told[#told + 1] = n
    i = i + 1 + 2 * n
  else
    local ids = {}
    for j = 1, n do
      ids[j] = redis.call('XADD', KEYS[1], '*', 'h', ARGV[i + 2 * j - 1], 'p', ARGV[i + 2 * j])
    end
    room = room - n
    told[#told + 1] = ids
    i = i + 1 + 2 * n
  end
end
redis.call('SET', KEYS[2], cjson.encode({ARGV[1], told}), 'EX', ARGV[2])
return told
""")

MISSING = Script("""
-- queue | ids. Gives those that the queue does not have any more.
local missing = {}
for _, id in ipairs(ARGV) do
  if #redis.call('XRANGE', KEYS[1], id, id) == 0 then missing[#missing + 1] = id end
end
return missing
""")

ANSWER = Script("""
-- queue, replies of each client | group, seconds, how many ids, ids, a message for each client.
-- What is answered leaves the queue first: in a broker without memory, the answers may then still be written.
local ids, n = {}, tonumber(ARGV[3])
for i = 1, n do ids[i] = ARGV[3 + i] end
if n > 0 then
  redis.call('XACK', KEYS[1], ARGV[1], unpack(ids))
  redis.call('XDEL', KEYS[1], unpack(ids))
end
for i = 2, #KEYS do
  redis.call('XADD', KEYS[i], '*', 'a', ARGV[2 + n + i])
  redis.call('EXPIRE', KEYS[i], ARGV[2])
end
return n
""")

BURY = Script("""
-- queue, dead letters | group, id, reason, most letters, then the fields of the entry.
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
return redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'id', ARGV[2], 'why', ARGV[3], unpack(ARGV, 5))
""")

INHERIT = Script("""
-- queue | group, me, idle milliseconds, how many. Takes entries over from workers that do not renew their leases.
-- Gives {id, fields, how often it was handed out before} of each.
local found = redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[3], '-', '+', ARGV[4])
local mine = {}
for _, p in ipairs(found) do
  if p[2] ~= ARGV[2] then
    local got = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], p[1])
    if got[1] then
      mine[#mine + 1] = {p[1], got[1][2], p[4]}
    else
      redis.call('XACK', KEYS[1], ARGV[1], p[1])  -- its caller took it out of the queue
    end
  end
end
return mine
""")

LEAVE = Script("""
-- queue | group, me ('' for none), idle milliseconds. Forgets this worker, and those that are gone and hold nothing.
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
