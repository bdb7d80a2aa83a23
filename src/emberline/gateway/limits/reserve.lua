-- Reserve all claims of a call or none, atomically: the rule of bucket.py, by the clock of Redis.
--   KEYS  for each claim: a hash slot -> used, a sorted set of reservations ("name:slot:amount" by expiry)
--   ARGV  name, hold in milliseconds, then for each claim: limit, amount, and the window (slot length, live slots, offset)
--   returns for each claim: 1 or 0 (it fits), slot, amount granted, remaining, milliseconds (to the reset, or to wait);
--         and last the expiry
local now = now_ms()
local expires = now + tonumber(ARGV[2])
local answer, grants, fits = {}, {}, true

for i = 1, #KEYS / 2 do
  local used_key, held_key, at = KEYS[2 * i - 1], KEYS[2 * i], 3 + 5 * (i - 1)
  local limit, amount = tonumber(ARGV[at]), tonumber(ARGV[at + 1])
  local length, live, offset = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
  local slot = slot_of(now, length, offset)

  for _, member in ipairs(redis.call('ZRANGEBYSCORE', held_key, '-inf', now)) do
    local held_slot, expired = string.match(member, ':(%-?%d+):(%d+)$')
    if tonumber(held_slot) > slot - live then redis.call('HINCRBY', used_key, held_slot, 0 - tonumber(expired)) end
    redis.call('ZREM', held_key, member)
  end

  local total, slots, fields = 0, {}, redis.call('HGETALL', used_key)
  for f = 1, #fields, 2 do
    local s, used = tonumber(fields[f]), tonumber(fields[f + 1])
    if s > slot - live then
      total = total + used
      slots[#slots + 1] = { s, used }
    else
      redis.call('HDEL', used_key, fields[f])
    end
  end

  local left, granted, wait = limit - total, nil, ends_of(slot, length, live, offset) - now
  if amount <= left then
    granted = amount
  elseif left > 0 and redis.call('ZCARD', held_key) == 0 then
    granted = left
  else
    fits = false
    table.sort(slots, function(a, b) return a[1] < b[1] end)
    local free = left
    for _, pair in ipairs(slots) do
      free = free + pair[2]
      if free >= math.min(amount, limit) then
        wait = ends_of(pair[1], length, live, offset) - now
        break
      end
    end
  end
  grants[i] = { used_key, held_key, slot, granted, math.max(ends_of(slot, length, live, offset), expires) - now }
  for _, value in ipairs({ granted and 1 or 0, slot, granted or 0, left - (granted or 0), wait }) do
    answer[#answer + 1] = value
  end
end

if fits then
  for _, grant in ipairs(grants) do
    local used_key, held_key, slot, granted, lasts = unpack(grant)
    redis.call('HINCRBY', used_key, slot, granted)
    redis.call('ZADD', held_key, expires, string.format('%s:%d:%d', ARGV[1], slot, granted))
    redis.call('PEXPIRE', used_key, lasts)
    redis.call('PEXPIRE', held_key, math.max(lasts, redis.call('PTTL', held_key)))
  end
end
answer[#answer + 1] = expires
return answer
