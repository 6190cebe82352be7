// Number formatting.

/** Format a weight with two significant digits, the precision of its byte. */
export function weightText(weight: number): string {
  if (weight <= 0) return "0";
  if (weight >= 0.995) return "1.0";
  if (weight < 0.0005) return "< 0.001";
  return weight >= 0.1 ? weight.toFixed(2) : weight >= 0.01 ? weight.toFixed(3) : weight.toFixed(4);
}

/** Format a number with a sign. Negative numbers have a minus sign (U+2212), not a hyphen. */
export function signedText(value: number, digits = 3): string {
  const text = Math.abs(value).toFixed(digits);
  return Number(text) === 0 ? text : `${value < 0 ? "−" : "+"}${text}`;
}

/** Format a number. Negative numbers have a minus sign (U+2212), not a hyphen. */
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
