// The fastest peer, as its own documentation uses it: batches of 500, and a handler that does nothing.
//
// What it is told comes as for every measured process; its times go to files that the stopwatch's reader knows
// (mongo_celery/bench/stopwatch.py): a count, and behind it monotonic seconds.
'use strict'

const fs = require('node:fs')
const path = require('node:path')
const { Redis } = require('ioredis')
const { MongoClient } = require('mongodb')
const { initSync } = require('mongochangestream')

const BATCH = 500
const LAPS_MAX = 1 << 19
const NANOSECONDS = 1e9

class Stopwatch {
  constructor(directory, kind) {
    this.count = 0
    this.written = 0
    this.laps = new Float64Array(LAPS_MAX)
    this.file = fs.openSync(path.join(directory, `${process.pid}.${kind}`), 'w+')
    fs.ftruncateSync(this.file, 8 * (LAPS_MAX + 1))
  }

  lap() {
    this.laps[this.count++] = Number(process.hrtime.bigint()) / NANOSECONDS
  }

  // Once a batch, and the count last: the reader trusts what it counts.
  show() {
    const laps = this.laps.subarray(this.written, this.count)
    fs.writeSync(this.file, new Uint8Array(laps.buffer, laps.byteOffset, laps.byteLength), 0, undefined, 8 * (this.written + 1))
    fs.writeSync(this.file, new Uint8Array(new Float64Array([this.count]).buffer), 0, 8, 0)
    this.written = this.count
  }
}

async function main() {
  const setting = JSON.parse(process.env.MONGO_CELERY_BENCH)
  const started = new Stopwatch(setting.clock, 'started')
  const ended = new Stopwatch(setting.clock, 'ended')
  const client = await MongoClient.connect(setting.mongo_url)
  const orders = client.db(`${setting.name}_data`).collection('orders')
  const sync = initSync(new Redis(setting.redis_url), orders)
  const handle = async (records) => {
    for (const _ of records) started.lap()
    started.show()
  }
  // Said behind each batch, when its position is saved.
  sync.emitter.on('stats', () => {
    while (ended.count < started.count) ended.lap()
    ended.show()
  })
  sync.emitter.on('cursorError', ({ error }) => { throw error })
  const stream = await sync.processChangeStream(handle, { batchSize: BATCH })
  await stream.start()
}

main().catch((error) => {
  console.error(error.message)
  process.exit(1)
})
