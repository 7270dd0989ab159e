-- Deletes the consumers of a group that have no pending entries and were idle for long: their
-- processes have ended and others have claimed their entries.
--
-- It is one step because XGROUP DELCONSUMER drops pending entries: an entry delivered between a
-- check and the deletion would be lost.
--
-- KEYS
--   1  stream
-- ARGV
--   1  group
--   2  consumer     the caller, which is kept
--   3  idle_max_ms  how long a consumer may be idle
-- Answers
--   {consumer, consumer, ...}, the names of those deleted; none if there is no such stream or group

if redis.call('EXISTS', KEYS[1]) == 0 then return {} end

local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])
if consumers.err then
  if string.find(consumers.err, 'NOGROUP', 1, true) then return {} end
  return consumers
end

local deleted = {}
for _, flat in ipairs(consumers) do
  local consumer = {}
  for i = 1, #flat, 2 do consumer[flat[i]] = flat[i + 1] end
  if consumer.name ~= ARGV[2] and consumer.pending == 0 and consumer.idle >= tonumber(ARGV[3]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], consumer.name)
    deleted[#deleted + 1] = consumer.name
  end
end
return deleted
