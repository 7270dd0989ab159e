package batch

type Submission = submission

type Pace = pace

const LingerMax = lingerMax

type InFlightBatch = inFlightBatch
