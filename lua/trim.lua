-- Frees the memory of entries that every group of a stream has finished: those below the oldest
-- pending entry and the last delivered one of all groups. It is one step, so that no group can be
-- created or set back between the check and the cut.
--
-- Trimming is approximate (~): Redis frees whole nodes of its tree, which is cheap, and keeps up to
-- a node of finished entries. It never frees more than asked for. Trimming by length (MAXLEN) would
-- free entries that were never delivered.
--
-- KEYS
--   1  stream
-- ARGV
--   none
-- Answers
--   {word, removed}
--   trimmed    and how many entries are gone; call again until it is 0, one call has a bound
--   no-group   the stream was never read, so nothing may be trimmed
--   no-stream  there is no such stream

if redis.call('EXISTS', KEYS[1]) == 0 then return { 'no-stream', 0 } end

-- The halves of an entry id have 64 bits, which exceeds Lua's numbers: compare them as text.
local function less(a, b)
  if #a ~= #b then return #a < #b end
  return a < b
end

local function before(a, b)
  local a_ms, a_seq = string.match(a, '^(%d+)%-(%d+)$')
  local b_ms, b_seq = string.match(b, '^(%d+)%-(%d+)$')
  if a_ms ~= b_ms then return less(a_ms, b_ms) end
  return less(a_seq, b_seq)
end

local oldest
for _, flat in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = {}
  for i = 1, #flat, 2 do group[flat[i]] = flat[i + 1] end
  local needed = group['last-delivered-id']
  if group.pending > 0 then
    local lowest = redis.call('XPENDING', KEYS[1], group.name)[2]
    -- A group that was set back has pending entries above its last delivered one.
    if before(lowest, needed) then needed = lowest end
  end
  if not oldest or before(needed, oldest) then oldest = needed end
end

if not oldest then return { 'no-group', 0 } end
return { 'trimmed', redis.call('XTRIM', KEYS[1], 'MINID', '~', oldest) }
