// Thumbnails of maps: max pooling, which keeps thin lines visible.

const MAX_SIDE = 40;

/** Return the side length of the thumbnail of a map. */
export function thumbnailSize(size: number): number {
  return Math.min(size, MAX_SIDE);
}

/** Downsample a (T, T) map with max pooling. */
export function thumbnail(map: Uint8Array, size: number): Uint8Array {
  const side = thumbnailSize(size);
  const pooled = new Uint8Array(side * side);
  const targetOf = Uint16Array.from({ length: size }, (_, index) => Math.floor((index * side) / size));
  for (let row = 0; row < size; row++) {
    const to = targetOf[row] * side;
    for (let column = 0; column < size; column++) {
      const byte = map[row * size + column];
      const index = to + targetOf[column];
      if (byte > pooled[index]) pooled[index] = byte;
    }
  }
  return pooled;
}

/** Entropy term -a ln(a) of the weight a of each byte, in nats. */
const ENTROPIES = Float32Array.from({ length: 256 }, (_, byte) => {
  const weight = (byte / 255) ** 2;
  return weight > 0 ? -weight * Math.log(weight) : 0;
});

/** Return the sum of the entropies of all rows, in nats. */
export function entropyOf(map: Uint8Array): number {
  let sum = 0;
  for (let index = 0; index < map.length; index++) sum += ENTROPIES[map[index]];
  return sum;
}
