// The openai package for Node against a live server.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import OpenAI from 'openai'
import { zodResponseFormat } from 'openai/helpers/zod'
import { z } from 'zod'

const client = new OpenAI({ baseURL: `${process.env.DSV4_URL}/v1`, apiKey: 'none', maxRetries: 0 })
const messages = [{ role: 'user', content: 'What is the capital of France?' }]
const quiet = { model: 'tiny', messages, temperature: 0, max_tokens: 40, reasoning_effort: 'none' }

test('openai: chat', async () => {
  const done = await client.chat.completions.create(quiet)
  assert.match(done.choices[0].message.content, /Paris/)
  assert.ok(done.usage.completion_tokens > 0)
})

test('openai: stream', async () => {
  let text = ''
  for await (const chunk of await client.chat.completions.create({ ...quiet, stream: true })) {
    text += chunk.choices[0]?.delta?.content ?? ''
  }
  assert.match(text, /Paris/)
})

test('openai: parse, with thinking', async () => {
  const City = z.object({ size: z.enum(['small', 'large']), old: z.boolean() })
  const done = await client.chat.completions.parse({
    model: 'tiny', messages, max_tokens: 400, seed: 1, temperature: 0,
    thinking_token_budget: 30, response_format: zodResponseFormat(City, 'city'),
  })
  City.parse(done.choices[0].message.parsed)
})

test('openai: responses', async () => {
  const done = await client.responses.create({
    model: 'tiny', input: messages[0].content, temperature: 0, max_output_tokens: 40,
    reasoning: { effort: 'none' },
  })
  assert.match(done.output_text, /Paris/)
})

test('openai: errors', async () => {
  await assert.rejects(
    client.chat.completions.create({ ...quiet, temperature: 9 }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === 'temperature',
  )
})
