package fulfillment

const EndedSession = endedSession

type Blockers = blockers

type BlockerKey = blockerKey

type BlockerSeen = blockerSeen

const SilentBetweenQueryMax = silentBetweenQueryMax

const NamedSession = namedSession
