// Numbers in text.

/** A weight as exact as its byte: two significant digits. */
export function weightText(weight: number): string {
  if (weight <= 0) return "0";
  if (weight >= 0.995) return "1.0";
  if (weight < 0.0005) return "< 0.001";
  return weight >= 0.1 ? weight.toFixed(2) : weight >= 0.01 ? weight.toFixed(3) : weight.toFixed(4);
}

/** A number with its sign, a real minus. */
export function signedText(value: number, digits = 3): string {
  const text = Math.abs(value).toFixed(digits);
  return Number(text) === 0 ? text : `${value < 0 ? "−" : "+"}${text}`;
}

/** A number with a real minus. */
export function plainText(value: number, digits = 3): string {
  const text = Math.abs(value).toFixed(digits);
  return value < 0 && Number(text) !== 0 ? `−${text}` : text;
}

export function percentText(share: number): string {
  return `${Math.round(100 * share)} %`;
}

export function counted(count: number, noun: string): string {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}
