-- Returns the given commands that the Redis user is not allowed to run or that the server does not
-- have. Nothing is run.
--
-- KEYS
--   1  key  for which the commands would be run
-- ARGV
--   1  command  the first one, as on a command line, with "key" for the key
--   and so on: one for every further command
-- Answers
--   {command, ...}: those of the given ones that are refused

local refused = {}
for i = 1, #ARGV do
  local words = {}
  for word in string.gmatch(ARGV[i], '%S+') do
    words[#words + 1] = word == 'key' and KEYS[1] or word
  end
  -- pcall: acl_check_cmd raises an error for an unknown command, and does not exist before Redis
  -- 7.0.
  local known, allowed = pcall(redis.acl_check_cmd, unpack(words))
  if not (known and allowed) then refused[#refused + 1] = ARGV[i] end
end
return refused
