-- Takes units for a user, in the form that tutorials teach: each step is its own command, and the
-- answer is a number. Redis runs nothing else in between, so the steps are atomic.
--
-- KEYS
--   1  stock     string: units left
--   2  buyers    set of users
-- ARGV
--   1  user
--   2  quantity  decimal, at least 1
-- Answers 0 if the user got the units, 1 if fewer are left, and 2 if the user has bought before.
if tonumber(redis.call('GET', KEYS[1]) or 0) < tonumber(ARGV[2]) then
  return 1
end
if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then
  return 2
end
redis.call('DECRBY', KEYS[1], ARGV[2])
redis.call('SADD', KEYS[2], ARGV[1])
return 0
