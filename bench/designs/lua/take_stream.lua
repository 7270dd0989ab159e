-- Takes units for a user as take.lua does, and appends the order to a stream in the same step. The
-- entry has the fields of watermill-redisstream's publisher, which sends empty metadata as an empty
-- string.
--
-- KEYS
--   1  stock     string: units left
--   2  buyers    set of users
--   3  orders    stream
-- ARGV
--   1  user
--   2  quantity  decimal, at least 1
--   3  order     id of the message
--   4  payload   of the message
-- Answers 0 if the user got the units, 1 if fewer are left, and 2 if the user has bought before.
if tonumber(redis.call('GET', KEYS[1]) or 0) < tonumber(ARGV[2]) then
  return 1
end
if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then
  return 2
end
redis.call('DECRBY', KEYS[1], ARGV[2])
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('XADD', KEYS[3], '*', '_watermill_message_uuid', ARGV[3], 'metadata', '', 'payload', ARGV[4])
return 0
