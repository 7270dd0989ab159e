package audit

var SaleFields = saleFields

const RemedyProjections = remedyProjections

const RemedyOperator = remedyOperator

const EquationsShown = equationsShown

const FindingsShown = findingsShown

const RemedyWorker = remedyWorker

const RemedyForget = remedyForget

const RemedyAppend = remedyAppend

const RepairsPerTurn = repairsPerTurn
