// Keyboard shortcuts, and the dialog that lists them and can turn them off.
import { element, newId } from "../dom";

export interface Moves {
  step(by: number): void;
  token(by: number): void;
  head(by: number): void;
  layer(by: number): void;
}

const SHORTCUTS = [
  ["← →", "previous and next step"],
  ["Shift + ← →", "previous and next token"],
  ["[ ]", "previous and next head"],
  ["{ }", "previous and next layer"],
  ["?", "this list"],
];

/** Listen for shortcuts in the document. Returns the dialog and the button that opens it. */
export function keyboard(moves: Moves): { dialog: HTMLDialogElement; button: HTMLButtonElement } {
  const title = newId("keys");
  const enabled = element("input", { type: "checkbox", id: newId("enabled"), checked: true });
  const close = element("button", { type: "button", class: "toggle" }, "Close");
  const rows = SHORTCUTS.map(([keys, meaning]) => element("tr", {}, element("th", { scope: "row" }, element("kbd", {}, keys)), element("td", {}, meaning)));
  const dialog = element(
    "dialog",
    { "aria-labelledby": title },
    element("h2", { id: title }, "Keyboard"),
    element("table", { class: "bars" }, element("tbody", {}, ...rows)),
    element("p", { class: "about" }, "In the list of tokens, the arrow keys select a token. Tab moves between controls."),
    element("div", { class: "bar" }, enabled, element("label", { for: enabled.id }, "Use these shortcuts"), close),
  );
  const button = element("button", { type: "button", class: "toggle", "aria-haspopup": "dialog" }, "Keyboard (?)");
  button.addEventListener("click", () => dialog.showModal());
  close.addEventListener("click", () => dialog.close());
  const actions: Record<string, (event: KeyboardEvent) => void> = {
    ArrowLeft: (event) => (event.shiftKey ? moves.token(-1) : moves.step(-1)),
    ArrowRight: (event) => (event.shiftKey ? moves.token(1) : moves.step(1)),
    "[": () => moves.head(-1),
    "]": () => moves.head(1),
    "{": () => moves.layer(-1),
    "}": () => moves.layer(1),
    "?": () => dialog.showModal(),
  };
  document.addEventListener("keydown", (event) => {
    const isField = event.target instanceof Element && event.target.closest("input, select") !== null;
    if (event.defaultPrevented || dialog.open || isField || event.metaKey || (event.ctrlKey && !event.altKey)) return;
    const action = actions[event.key];
    if (!action || !enabled.checked || (event.altKey && event.key.startsWith("Arrow"))) return; // Alt + arrow is the browser's
    event.preventDefault();
    action(event);
  });
  return { dialog, button };
}
