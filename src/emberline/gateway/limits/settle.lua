-- Replace reserved amounts by used ones. Idempotent: a claim that is neither held nor expired was settled before.
--   KEYS  as in reserve.lua
--   ARGV  name, its expiry, then for each claim: slot, amount granted, amount used, and the window
local now = now_ms()
local expired = now >= tonumber(ARGV[2])

for i = 1, #KEYS / 2 do
  local used_key, held_key, at = KEYS[2 * i - 1], KEYS[2 * i], 3 + 6 * (i - 1)
  local slot, granted, actual = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local length, live, offset = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5])
  local held = redis.call('ZREM', held_key, string.format('%s:%d:%d', ARGV[1], slot, granted)) == 1
  local change = held and actual - granted or expired and actual or 0
  if change ~= 0 and slot > slot_of(now, length, offset) - live then
    redis.call('HINCRBY', used_key, slot, change)
    local lasts = ends_of(slot, length, live, offset) - now
    redis.call('PEXPIRE', used_key, math.max(lasts, redis.call('PTTL', used_key)))
  end
end
