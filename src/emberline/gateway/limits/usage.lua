-- Return the current usage of each bucket. Changes nothing.
--   KEYS  as in reserve.lua
--   ARGV  for each claim the window (slot length, live slots, offset)
--   returns for each claim: usage including reservations, milliseconds until none of it counts
local now = now_ms()
local answer = {}

for i = 1, #KEYS / 2 do
  local used_key, held_key, at = KEYS[2 * i - 1], KEYS[2 * i], 1 + 3 * (i - 1)
  local length, live, offset = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local slot, total = slot_of(now, length, offset), 0

  local fields = redis.call('HGETALL', used_key)
  for f = 1, #fields, 2 do
    if tonumber(fields[f]) > slot - live then total = total + tonumber(fields[f + 1]) end
  end
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', held_key, '-inf', now)) do
    local held_slot, expired = string.match(member, ':(%-?%d+):(%d+)$')
    if tonumber(held_slot) > slot - live then total = total - tonumber(expired) end
  end
  answer[#answer + 1] = total
  answer[#answer + 1] = ends_of(slot, length, live, offset) - now
end
return answer
