package deadletter

const FieldReplayOf = fieldReplayOf

var (
	EncodeFields = encodeFields
	DecodeFields = decodeFields
	OnlyOrder    = onlyOrder
)
