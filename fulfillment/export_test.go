package fulfillment

var SaleFields = saleFields

const RemedyProjections = remedyProjections

const RemedyOperator = remedyOperator

const EquationsShown = equationsShown

const FindingsShown = findingsShown

const EndedSession = endedSession

type Blockers = blockers

type BlockerKey = blockerKey

type BlockerSeen = blockerSeen

const SilentBetweenQueryMax = silentBetweenQueryMax

const NamedSession = namedSession

const RemedyWorker = remedyWorker

const RemedyForget = remedyForget

const RemedyAppend = remedyAppend

const RepairsPerTurn = repairsPerTurn
