-- The arithmetic of window.py, for decisions by the clock of Redis.
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Days before a calendar month. Years begin in March here, so that the leap day is the last day of its year.
local function days_before(month)
  local year, m = math.floor(month / 12), month % 12 + 1
  if m <= 2 then year = year - 1 end
  local era, shifted = math.floor(year / 400), (m + 9) % 12
  local of_era = year - era * 400
  local day = of_era * 365 + math.floor(of_era / 4) - math.floor(of_era / 100) + math.floor((153 * shifted + 2) / 5)
  return era * 146097 + day - 719468
end

local function slot_of(now, length, offset)
  if length > 0 then return math.floor((now - offset) / length) end
  local day = math.floor(now / 86400000)
  local month = 1970 * 12 + math.floor(day / 31)
  while days_before(month + 1) <= day do month = month + 1 end
  return month
end

local function ends_of(slot, length, live, offset)
  if length > 0 then return (slot + live) * length + offset end
  return days_before(slot + live) * 86400000
end
