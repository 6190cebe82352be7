// Small pictures of maps: the largest weight of each piece, which keeps thin lines visible.

const MAX_SIDE = 40;

/** How many cells wide the picture of T tokens is. */
export function thumbnailSize(size: number): number {
  return Math.min(size, MAX_SIDE);
}

/** The largest byte of each piece of a map (T, T). */
export function thumbnail(map: Uint8Array, size: number): Uint8Array {
  const side = thumbnailSize(size);
  const pooled = new Uint8Array(side * side);
  const pieceOf = Uint16Array.from({ length: size }, (_, place) => Math.floor((place * side) / size));
  for (let row = 0; row < size; row++) {
    const to = pieceOf[row] * side;
    for (let column = 0; column < size; column++) {
      const byte = map[row * size + column];
      const place = to + pieceOf[column];
      if (byte > pooled[place]) pooled[place] = byte;
    }
  }
  return pooled;
}

/** −a ln a of each byte's weight a, in nats. */
const ENTROPIES = Float32Array.from({ length: 256 }, (_, byte) => {
  const weight = (byte / 255) ** 2;
  return weight > 0 ? -weight * Math.log(weight) : 0;
});

/** The entropies of all rows together. */
export function entropyOf(map: Uint8Array): number {
  let sum = 0;
  for (let place = 0; place < map.length; place++) sum += ENTROPIES[map[place]];
  return sum;
}
