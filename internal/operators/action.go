package operators

import "fmt"

// Action is what an operator does, through the HTTP API or at the dashboard.
type Action string

// The actions.
const (
	Look           Action = "look"           // at orders, payments and histories, and at the pages of the dashboard
	ReportPayment  Action = "report-payment" // the shop's server
	SettlePayment  Action = "settle-payment" // note a refund, or dismiss
	ChangeSale     Action = "change-sale"    // pause, resume, restock, rename
	CancelOrder    Action = "cancel-order"
	SteerTarget    Action = "steer-target" // pause, resume, replay
	ResolveLetters Action = "resolve-letters"
	RunAudit       Action = "run-audit" // and apply its remedies
	NoteTrouble    Action = "note-trouble"
	CreateSale     Action = "create-sale"
	EndSale        Action = "end-sale"
	DrawSale       Action = "draw-sale" // create a draw, or open the sale after it
)

// lowest is the lowest role that may take each action, by whichever way.
var lowest = map[Action]Role{
	Look:           Viewer,
	ReportPayment:  Cashier,
	SettlePayment:  Cashier,
	ChangeSale:     Operator,
	CancelOrder:    Operator,
	SteerTarget:    Operator,
	ResolveLetters: Operator,
	RunAudit:       Operator,
	NoteTrouble:    Operator,
	CreateSale:     Admin,
	EndSale:        Admin,
	DrawSale:       Admin,
}

// Lowest returns the lowest role that may take the action. It panics if there is no such action: the zero role is
// everybody's.
func (a Action) Lowest() Role {
	role, known := lowest[a]
	if !known {
		panic(fmt.Sprintf("operators have no action %q", a))
	}
	return role
}

// May reports whether the operator may take the action.
func (p Person) May(a Action) bool { return p.Role >= a.Lowest() }
